"""What is read of a request, and what an engine is sent of it: the same fields, each once.

Fields that nobody reads here go on as they came. The engine checks them; nothing is guessed.
"""

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from router.client import WrittenTokens
from router.errors import InvalidFieldError
from router.process.bodies import decode_now
from router.protocol.values import Name, TokenCount, TokenId, UInt

OpenAiPath: TypeAlias = Literal["/v1/completions", "/v1/chat/completions"]
COMPLETIONS: OpenAiPath = "/v1/completions"
CHAT: OpenAiPath = "/v1/chat/completions"
PATHS: dict[bytes, OpenAiPath] = {each.encode(): each for each in (COMPLETIONS, CHAT)}

QUERY_ONLY = "query_instance_id"
"""The annotation that asks where a request would go, and sends it nowhere."""

_ALLOWED_PROMPTS = "a text, token ids, or a list of one of these"


ABSENT = Raw(b"")

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no such value."""


class AgentHints(Struct, frozen=True):
    """What a client knows of its request, as Dynamo's clients say it."""

    latency_sensitivity: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    osl: TokenCount | None = None
    priority: int | None = None


class Extensions(Struct, frozen=True):
    """`nvext`: what Dynamo's clients say beside OpenAI's fields."""

    annotations: list[str] = []
    backend_instance_id: UInt | None = None
    prefill_worker_id: UInt | None = None
    decode_worker_id: UInt | None = None
    token_data: list[TokenId] | None = None
    agent_hints: AgentHints = AgentHints()

    @property
    def is_query(self) -> bool:
        """Whether only the choice is asked for."""
        return any(each.partition(":")[0] == QUERY_ONLY for each in self.annotations)


_NO_EXTENSIONS = Extensions()


class StreamOptions(Struct, frozen=True):
    """What a stream says beside its text."""

    include_usage: bool = False


class _Read(Struct, frozen=True):
    model: Name = "default"
    prompt: Raw = ABSENT
    messages: list[Raw] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    nvext: Extensions | None = None


_read = msgspec.json.Decoder(_Read).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_text_of = bytes.decode
_BEGINS = re.compile(rb'\[\s*([\["])')  # a list of prompts
_texts = msgspec.json.Decoder(str | list[str]).decode
_token_lists = msgspec.json.Decoder(list[list[TokenId]]).decode


class Asked(Struct, frozen=True):
    """A request for a completion. `fields`: its body, each field as it was written.

    `prompt`: a text or tokens, of several prompts the first; None of a chat, which has `messages`.
    Tokens of the only prompt are not read: the router says what is wrong with them.
    """

    path: OpenAiPath
    fields: dict[str, Raw]
    read: _Read
    prompt: str | Sequence[int] | None

    @property
    def extensions(self) -> Extensions:
        """What it says as Dynamo's clients do."""
        return self.read.nvext or _NO_EXTENSIONS

    @property
    def model(self) -> str:
        """Which model it wants."""
        return self.read.model

    @property
    def is_stream(self) -> bool:
        """Whether it wants an answer piece by piece."""
        return bool(self.read.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether its stream is to end with the usage."""
        return self.read.stream_options is not None and self.read.stream_options.include_usage

    @property
    def known_tokens(self) -> Sequence[int] | None:
        """The prompt's tokens, if it says them."""
        extensions = self.read.nvext
        if extensions is not None and extensions.token_data is not None:
            return extensions.token_data
        return None if isinstance(self.prompt, str) else self.prompt

    def check_prompt(self) -> None:
        """Raises InvalidFieldError if its tokens are none."""
        if isinstance(self.prompt, WrittenTokens):
            self.prompt.tolist()

    @property
    def prompts(self) -> int:
        """How many completions it asks for at once, each of its own prompt."""
        begins = _BEGINS.match(self.read.prompt)
        if self.path == CHAT or begins is None:
            return 1
        kind: Any = {b"[": list[list[Raw]], b'"': list[Raw]}[begins[1]]
        return len(msgspec.json.decode(self.read.prompt, type=kind))

    @property
    def has_several_prompts(self) -> bool:
        """Whether they are more than one."""
        return self.prompts > 1

    @property
    def choices(self) -> int:
        """How many answers it wants, of each prompt as many."""
        return max(1, self.read.n or 1) * self.prompts

    @property
    def max_tokens(self) -> int | None:
        """How long the answer may be."""
        most = self.read.max_completion_tokens
        return self.read.max_tokens if most is None else most

    def to_engine(self, without: Collection[str] = (), **fields: Any) -> bytes:
        """The body for an engine: as it came, with these fields instead of or beside its own."""
        left = {"nvext", *without}
        sent: dict[str, Any] = {name: v for name, v in self.fields.items() if name not in left}
        priority = self.extensions.agent_hints.priority
        if priority is not None and "priority" not in sent:
            sent["priority"] = priority
        return msgspec.json.encode({**sent, **fields})


def read_asked(path: OpenAiPath, body: bytes) -> Asked:
    """A request, as far as it is read here. Raises MalformedBodyError, InvalidFieldError."""
    read = decode_now(_read, body)
    fields = decode_now(_fields, body)
    if not body.isascii():
        decode_now(_text_of, body)  # also of fields that nobody reads here
    if path == CHAT:
        if not read.messages:
            raise InvalidFieldError("messages", "missing or empty", "at least one message")
        return Asked(path, fields, read, None)
    return Asked(path, fields, read, _prompt(bytes(read.prompt)))


def _prompt(raw: bytes) -> str | Sequence[int]:
    if raw in (b"", b"null"):
        raise InvalidFieldError("prompt", "missing", _ALLOWED_PROMPTS)
    begins = raw[1:].lstrip()[:1] if raw[:1] == b"[" else b""
    if begins.isdigit():
        return WrittenTokens(raw, "prompt")
    decode: Any = _token_lists if begins == b"[" else _texts
    try:
        prompts: Any = decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidFieldError("prompt", str(error), _ALLOWED_PROMPTS, status=422) from error
    prompt: str | list[int] = prompts if isinstance(prompts, str) or not prompts else prompts[0]
    if not prompt:
        raise InvalidFieldError("prompt", "empty", "at least one token")
    return prompt
