"""The generating APIs: what a request's prompt is, and how answers, streams and errors look.

Everything that differs between APIs is a column of this table, so that requests of all of them take
one road. Facts: vLLM 0.32, SGLang 0.5.23.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

from msgspec import Struct

from router.forward.apis import error_formats, reported_usage
from router.forward.apis.error_formats import ErrorFormat
from router.forward.apis.reported_usage import Reported
from router.forward.apis.stream_events import StreamEvent, event_of_messages, event_of_responses

ApiPath: TypeAlias = Literal[
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
]
COMPLETIONS: ApiPath = "/v1/completions"
CHAT: ApiPath = "/v1/chat/completions"
RESPONSES: ApiPath = "/v1/responses"
MESSAGES: ApiPath = "/v1/messages"
COUNT_TOKENS: ApiPath = "/v1/messages/count_tokens"


class Api(Struct, frozen=True):
    """One API.

    `prompt`: the field that must be there. `prompt_fields`: all fields whose text is in the prompt.
    `limits`: the fields that limit the output; the first one that is set holds. `answer_object`:
    the kind of its answers. `reported`: what a whole answer says about itself. `event_of`: reads an
    event of its streams; None: they are chunks of OpenAI's, up to `[DONE]`. `errors`: their format.

    `can_continue`: an interrupted stream may go on at another worker, and a prompt be computed by
    another one: engines take the fields for both. `computes`: an engine generates from its prompt.
    `passes`: requests and answers pass byte for byte, see `passed.py`; no `prompt` is read.
    `engines`: the kinds of engines that have it.
    `chooses_rank`: engines compute the request on the rank that is named in a header. vLLM 0.32
    does not for Responses, which its own balancer places.
    """

    path: str
    prompt: Literal["prompt", "messages", "input"] | None
    prompt_fields: tuple[str, ...]
    limits: tuple[str, ...]
    answer_object: str
    reported: Callable[[bytes], Reported]
    event_of: Callable[[bytes], StreamEvent] | None
    errors: ErrorFormat
    can_continue: bool = False
    computes: bool = True
    passes: bool = False
    engines: tuple[str, ...] = ("vllm", "sglang", "tensorrt_llm")
    chooses_rank: bool = True


_CHAT_LIMITS = ("max_completion_tokens", "max_tokens")
_OF_MESSAGES = ("system", "messages", "tools")

_TABLE = (
    Api(
        COMPLETIONS, "prompt", ("prompt",), _CHAT_LIMITS, "text_completion",
        reported_usage.of_openai, None, error_formats.OPENAI, can_continue=True,
    ),
    Api(
        CHAT, "messages", ("messages",), _CHAT_LIMITS, "chat.completion",
        reported_usage.of_openai, None, error_formats.OPENAI, can_continue=True,
    ),
    Api(
        RESPONSES, "input", ("instructions", "input", "tools"), ("max_output_tokens",), "response",
        reported_usage.of_responses, event_of_responses, error_formats.RESPONSES,
        chooses_rank=False,
    ),
    Api(
        MESSAGES, "messages", _OF_MESSAGES, ("max_tokens",), "message",
        reported_usage.of_messages, event_of_messages, error_formats.ANTHROPIC,
    ),
    Api(
        COUNT_TOKENS, "messages", _OF_MESSAGES, (), "message_tokens_count",
        reported_usage.of_nothing, event_of_messages, error_formats.ANTHROPIC, computes=False,
    ),
)  # fmt: skip

APIS: dict[str, Api] = {api.path: api for api in _TABLE}
"""The APIs by path."""
