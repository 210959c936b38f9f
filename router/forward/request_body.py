"""Parsed requests of all generating APIs, and the bodies sent to engines.

Fields that are not read here are passed on unchanged. The engine validates them; nothing is
guessed.
"""

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from router.client import EncodedTokens
from router.errors import InvalidFieldError
from router.forward.apis.api import APIS, Api
from router.forward.apis.forms import form_fields
from router.forward.apis.passed import PASSED
from router.protocol.requests import Milliseconds, Unmet
from router.protocol.values import Name, TokenCount, TokenId, UInt
from router.runtime.process.json_bodies import decode_now

QUERY_ONLY = "query_instance_id"
"""The annotation of a request for a placement only, which is not forwarded."""

_ALLOWED_PROMPTS = "a text, token ids, or a list of one of these"

MOST_PROMPTS = 65_536
MOST_NAMES = 1 << 19
"""The limit of field names outside prompt, messages and input.

A logit bias may name each token of a vocabulary.
"""
_LEAST_NAME_BYTES = len(b'"":0,')

ABSENT = Raw(b"")


class AgentHints(Struct, frozen=True):
    """A client's hints about its request, in Dynamo's format."""

    latency_sensitivity: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    osl: TokenCount | None = None
    priority: int | None = None


class Extensions(Struct, frozen=True):
    """`nvext`: the fields that Dynamo's clients add to OpenAI's, and objectives."""

    annotations: list[str] = []
    backend_instance_id: UInt | None = None
    prefill_worker_id: UInt | None = None
    decode_worker_id: UInt | None = None
    token_data: list[TokenId] | None = None
    agent_hints: AgentHints = AgentHints()
    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None
    slo_unmet: Unmet | None = None

    @property
    def is_query(self) -> bool:
        """True if only the placement is requested."""
        return any(each.partition(":")[0] == QUERY_ONLY for each in self.annotations)


_NO_EXTENSIONS = Extensions()


class StreamOptions(Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool = False


class _Texts(Struct, frozen=True):
    prompt: Raw = ABSENT
    messages: Raw = ABSENT
    input: Raw = ABSENT


class _Fields(Struct, frozen=True):
    model: Name = "default"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    nvext: Extensions | None = None


_NULL = Raw(b"null")
_READ = _Fields.__struct_fields__
_READ_OF_PASSED = ("model", "cache_salt")
"""The fields that are read of requests that pass byte for byte."""

_texts = msgspec.json.Decoder(_Texts).decode
_read = msgspec.json.Decoder(_Fields).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_text_of = bytes.decode
_BEGINS = re.compile(rb'\[\s*([\["])')  # a list of prompts
_NOTHING = re.compile(rb"\[\s*\]")
_text = msgspec.json.Decoder(str).decode
_each = msgspec.json.Decoder(list[Raw]).decode


class CompletionRequest(Struct, frozen=True):
    """A request of one API. `fields`: its body, each field as written.

    `prompt`: a text or tokens, the first if there are several prompts; None for all but
    completions, which have messages or items. Tokens and further prompts are not validated here:
    the router and engines do that. `body`: as received, if it is to pass byte for byte.
    """

    path: str
    fields: dict[str, Raw]
    read: _Fields
    prompt: str | Sequence[int] | None
    prompts: int = 1
    body: bytes | None = None

    @property
    def api(self) -> Api:
        """The API of the request."""
        known = APIS.get(self.path)
        return PASSED[self.path].api if known is None else known

    @property
    def extensions(self) -> Extensions:
        """The fields of Dynamo's clients."""
        return self.read.nvext or _NO_EXTENSIONS

    @property
    def is_query(self) -> bool:
        """True if only the placement is requested."""
        return self.read.nvext is not None and self.read.nvext.is_query

    @property
    def model(self) -> str:
        """The name of the requested model."""
        return self.read.model

    @property
    def is_stream(self) -> bool:
        """True if a streamed response is requested."""
        return bool(self.read.stream)

    @property
    def wants_usage(self) -> bool:
        """True if the stream is to end with the usage."""
        return self.read.stream_options is not None and self.read.stream_options.include_usage

    @property
    def known_tokens(self) -> Sequence[int] | None:
        """The prompt's tokens if the request contains them, otherwise None."""
        extensions = self.read.nvext
        if extensions is not None and extensions.token_data is not None:
            return extensions.token_data
        return None if isinstance(self.prompt, str) else self.prompt

    def check_prompt(self) -> None:
        """Raise InvalidFieldError if the prompt's tokens are invalid."""
        if isinstance(self.prompt, EncodedTokens):
            self.prompt.tolist()

    @property
    def size_bytes(self) -> int:
        """The size of what the prompt is made of, as written."""
        fields = self.fields
        return sum(memoryview(fields[n]).nbytes for n in self.api.prompt_fields if n in fields)

    @property
    def has_several_prompts(self) -> bool:
        """True if there is more than one prompt."""
        return self.prompts > 1

    @property
    def choices(self) -> int:
        """The number of requested responses, of all prompts together."""
        return max(1, self.read.n or 1) * self.prompts

    @property
    def max_tokens(self) -> int | None:
        """The limit of the response's tokens, or None."""
        values = (getattr(self.read, name) for name in self.api.limits)
        return next((most for most in values if most is not None), None)

    def to_engine(self, without: Collection[str] = (), **fields: Any) -> bytes:
        """Return the body for an engine, with `fields` added or replaced and `without` removed."""
        if self.body is not None:
            return self.body
        left = {"nvext", *without}
        sent: dict[str, Any] = {name: v for name, v in self.fields.items() if name not in left}
        priority = self.extensions.agent_hints.priority
        if priority is not None and "priority" not in sent:
            sent["priority"] = priority
        return msgspec.json.encode({**sent, **fields})


def read_completion_request(path: str, body: bytes) -> CompletionRequest:
    """Parse a request. Raises MalformedBodyError, InvalidFieldError.

    Each step takes at most a few ms per MB, whatever the body contains.
    """
    _check_names(body)
    fields = decode_now(_fields, body)
    if not body.isascii():
        decode_now(_text_of, body)  # also validates fields that are not read
    read = _read_of(fields, _READ)
    prompt = APIS[path].prompt
    text = bytes(fields.get(prompt or "", ABSENT))
    if prompt == "prompt":
        return CompletionRequest(path, fields, read, *_prompts(text))
    if prompt == "messages":
        _check_messages(text)
    else:
        _check_input(text)
    return CompletionRequest(path, fields, read, None)


def read_passed_request(path: str, body: bytes, content_type: bytes) -> CompletionRequest:
    """Parse a request that passes byte for byte. Raises MalformedBodyError, InvalidFieldError."""
    if PASSED[path].is_form:
        fields = form_fields(content_type, body)
        if fields.get("model", _NULL) == _NULL:
            raise InvalidFieldError("model", "missing", "the name of a model")
    else:
        if body.count(b":") > MOST_NAMES:
            raise InvalidFieldError("body", "too many fields", f"at most {MOST_NAMES} names")
        fields = decode_now(_fields, body)
        if not body.isascii():
            decode_now(_text_of, body)
    read = _read_of(fields, _READ_OF_PASSED)
    return CompletionRequest(path, fields, read, None, body=body)


def _read_of(fields: dict[str, Raw], names: Sequence[str]) -> _Fields:
    """Return the fields that are read, without another scan of a long prompt."""
    written = msgspec.json.encode({name: fields[name] for name in names if name in fields})
    return decode_now(_read, written)


def _check_names(body: bytes) -> None:
    """Raise InvalidFieldError if there are more than `MOST_NAMES` names."""
    if len(body) < MOST_NAMES * _LEAST_NAME_BYTES or body.count(b":") <= MOST_NAMES:
        return
    read = decode_now(_texts, body)
    texts = (read.prompt, read.messages, read.input)
    written = sum(bytes(each).count(b":") for each in texts)
    if body.count(b":") - written > MOST_NAMES:
        raise InvalidFieldError("body", "too many fields", f"at most {MOST_NAMES} names in all")


def _check_messages(written: bytes) -> None:
    """Raise InvalidFieldError if there are no messages."""
    if written in (b"", b"null") or _NOTHING.fullmatch(written):
        raise InvalidFieldError("messages", "missing or empty", "at least one message")
    if not written.startswith(b"["):
        raise InvalidFieldError("messages", "no list", "at least one message", status=422)


def _check_input(written: bytes) -> None:
    """Raise InvalidFieldError if there is no input, or one that is neither a text nor a list."""
    allowed = "a text, or a list of items"
    if written in (b"", b"null"):
        raise InvalidFieldError("input", "missing", allowed)
    if written[:1] not in (b'"', b"["):
        raise InvalidFieldError("input", "neither text nor list", allowed, status=422)


def _prompts(raw: bytes) -> tuple[str | Sequence[int], int]:
    """Return the first prompt, and the number of prompts."""
    begins = _BEGINS.match(raw)
    if begins is None:
        return prompt_of(raw), 1
    if begins[1] == b"[" and raw.count(b"[") > MOST_PROMPTS:
        raise _too_many_prompts()
    each = decode_now(_each, raw)
    if len(each) > MOST_PROMPTS:
        raise _too_many_prompts()
    if not all(bytes(other).startswith(begins[1]) for other in each):
        raise InvalidFieldError("prompt", "prompts of several kinds", _ALLOWED_PROMPTS)
    return prompt_of(bytes(each[0])), len(each)


def prompt_of(raw: bytes) -> str | Sequence[int]:
    """Return a prompt, the first of several. Raises InvalidFieldError."""
    if raw in (b"", b"null"):
        raise InvalidFieldError("prompt", "missing", _ALLOWED_PROMPTS)
    if raw[:1] == b"[":
        if _NOTHING.fullmatch(raw):
            raise InvalidFieldError("prompt", "empty", "at least one token")
        return EncodedTokens(raw, "prompt")
    try:
        text = _text(raw)
    except msgspec.ValidationError as error:
        raise InvalidFieldError("prompt", str(error), _ALLOWED_PROMPTS, status=422) from error
    if not text:
        raise InvalidFieldError("prompt", "empty", "at least one token")
    return text


def _too_many_prompts() -> InvalidFieldError:
    return InvalidFieldError("prompt", "too many prompts", f"at most {MOST_PROMPTS}")
