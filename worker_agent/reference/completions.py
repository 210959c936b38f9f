"""The OpenAI completions interface for a byte-level model: request and response bodies.

A chat is a completion of the text that `chat.py` makes of it, with another response format.
"""

import codecs
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, to_builtins

from router.errors import InvalidFieldError
from router.protocol.replies import BlockSource
from router.protocol.requests import RankTarget
from worker_agent.blocks.descriptors import BlockDescriptorList
from worker_agent.reference.engine.batching import GenerationRequest
from worker_agent.reference.engine.engine import Generated
from worker_agent.reference.engine.model import VOCABULARY

ByteToken = Annotated[int, Meta(ge=0, lt=VOCABULARY)]


class StreamOptions(Struct, frozen=True):
    """The content of a stream besides text."""

    include_usage: bool = False


class KvTransferParams(Struct, frozen=True):
    """A request's fields on blocks, named as in vLLM.

    `source`: of a decision. `priority`: of the prompt's blocks in the lower tiers, where the
    highest are stored first and kept longest. `do_remote_decode`: True if another worker decodes,
    and the response must contain the source of the prompt's blocks. `target`: the rank that is to
    decode, to which these are pushed while they are computed. `leased`: the source's first blocks,
    which it keeps for this request.
    """

    source: BlockSource | None = None
    leased: BlockDescriptorList | None = None
    priority: Annotated[int, Meta(ge=0, le=100)] = 0
    do_remote_decode: bool = False
    target: RankTarget | None = None


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """A completion; greedy unless a temperature is given.

    `return_token_ids`: True to add tokens. `max_tokens`: None for the available space.
    """

    prompt: str | list[ByteToken]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = 16
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    seed: Annotated[int, Meta(ge=0)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    kv_transfer_params: KvTransferParams | None = None
    n: int = 1
    best_of: int = 1
    echo: bool = False
    stop: str | list[str] | None = None
    logprobs: int | None = None


def checked(
    body: CompletionRequest, model_name: str, max_model_len: int, request_id: str
) -> GenerationRequest:
    """Return the engine's request. Raises InvalidFieldError if it is not supported."""
    prompt = list(body.prompt.encode() if isinstance(body.prompt, str) else body.prompt)
    _refuse_unsupported(body)
    if body.model not in (None, model_name):
        raise InvalidFieldError("model", f"{body.model!r} is not served", model_name, status=404)
    if not prompt:
        raise InvalidFieldError("prompt", "empty", "at least one token")
    room_tokens = max(1, max_model_len - len(prompt))
    max_tokens = room_tokens if body.max_tokens is None else body.max_tokens
    if len(prompt) + max_tokens > max_model_len:
        length = f"{len(prompt)} prompt and {max_tokens} output tokens"
        raise InvalidFieldError("max_tokens", length, f"at most {max_model_len} together")
    params = body.kv_transfer_params or KvTransferParams()
    return GenerationRequest(
        request_id,
        prompt,
        max_tokens,
        body.cache_salt,
        body.temperature,
        body.seed,
        priority=params.priority,
    )


class HandOver(Struct, frozen=True, omit_defaults=True):
    """The response fields that let another worker load the prompt's blocks from here.

    `pushed`: the number of blocks that were pushed to the target.
    """

    source: BlockSource
    pushed: int
    leased: BlockDescriptorList | None = None


def handed_over(hand_over: HandOver) -> dict[str, object]:
    """Return the response's KV transfer parameters, which are sent to the other worker."""
    fields = to_builtins(hand_over)
    return {"do_remote_prefill": True, "do_remote_decode": False, **fields}


class AgentResponse:
    """A response in progress: its text so far, and its bodies."""

    def __init__(
        self,
        body: CompletionRequest,
        request: GenerationRequest,
        model: str,
        *,
        is_chat: bool = False,
    ) -> None:
        self._is_chat = is_chat
        self._body = body
        self._model = model
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request.request_id}"
        self._created = int(time.time())
        self._prompt_tokens = len(request.prompt)
        self._cached_tokens = 0
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, generated: Generated) -> bytes:
        """Add a token and return the stream's next chunk."""
        text = self._decoder.decode(bytes([generated.token]), final=generated.is_last)
        self._tokens.append(generated.token)
        self._text.append(text)
        self._cached_tokens = generated.cached_tokens
        finish_reason = "length" if generated.is_last else None
        return _event(self._body_of(text, [generated.token], finish_reason))

    def whole(self, hand_over: HandOver | None = None) -> bytes:
        """Return the response of a request without streaming.

        `hand_over`: of the prompt's blocks, if the caller requested it.
        """
        body = self._body_of("".join(self._text), self._tokens, "length")
        if hand_over is not None:
            body["kv_transfer_params"] = handed_over(hand_over)
        return msgspec.json.encode({**body, "usage": self._usage()})

    def end(self) -> bytes:
        """Return the end of a stream."""
        done = b"data: [DONE]\n\n"
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return done
        usage = {**self._head(), "choices": [], "usage": self._usage()}
        return _event(usage) + done

    def _head(self) -> dict[str, Any]:
        chat = f"chat.completion{'.chunk' * self._body.stream}"
        return {
            "id": self._id,
            "object": chat if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def _body_of(self, text: str, tokens: list[int], finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            **self._content(text),
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = tokens
        return {**self._head(), "choices": [choice]}

    def _content(self, text: str) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": text}
        if not self._body.stream:
            return {"message": {"role": "assistant", "content": text}}
        role = {"role": "assistant"} if len(self._tokens) == 1 else {}
        return {"delta": {**role, "content": text}}

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(self._tokens),
            "total_tokens": self._prompt_tokens + len(self._tokens),
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


def _refuse_unsupported(body: CompletionRequest) -> None:
    asked: dict[str, tuple[object, object]] = {
        "n": (body.n, 1),
        "best_of": (body.best_of, 1),
        "echo": (body.echo, False),
        "stop": (body.stop or None, None),
        "logprobs": (body.logprobs, None),
    }
    for field, (value, only) in asked.items():
        if value != only:
            raise InvalidFieldError(field, f"{value!r} is not supported", f"{only}")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
