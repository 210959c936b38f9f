"""The state of one stream between engines and a client.

Engines are requested to send more than the client wants: token ids, with which another engine can
continue, and the usage at the end. What the client did not request is removed.
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.forward.apis.event_stream import EngineErrorEvent, EventStream
from router.forward.apis.sse import data_of
from router.forward.migration import Before, as_before
from router.forward.request_body import CompletionRequest
from router.protocol.requests import Usage
from router.protocol.values import UNREADABLE, TokenId

DONE = b"[DONE]"


class Wanted(Struct, frozen=True):
    """The options that the client itself requested."""

    token_ids: bool = False
    usage: bool = False
    choices: int = 1

    @classmethod
    def of(cls, asked: CompletionRequest) -> "Wanted":
        """Return the options of a request."""
        return cls(bool(asked.read.return_token_ids), asked.wants_usage, asked.choices)


class _Choice(Struct, frozen=True):
    index: int = 0
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None

    @property
    def tokens(self) -> int:
        """The number of new tokens; without token ids, 1 if there is any content."""
        if self.token_ids is not None:
            return len(self.token_ids)
        content = self.delta if self.delta is not None else {"text": self.text}
        return int(any(value for name, value in content.items() if name != "role"))


class _Chunk(Struct, frozen=True):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Raw = Raw(b"null")
    id: str | None = None
    created: int | None = None

    @property
    def error_was_sent(self) -> bool:
        """True if the chunk contains an error."""
        return bytes(self.error) != b"null"


_read = msgspec.json.Decoder(_Chunk).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_choices = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_OURS = ("token_ids", "prompt_token_ids")


class StreamState:
    """The state of a stream of OpenAI's chunks, over all engines that sent parts of it.

    `token_ids`: tokens generated so far; complete while `has_all_tokens`. `usage`: the last
    engine's usage. `has_first_token`: the first chunk was received. `is_done`: the end marker was.
    """

    __slots__ = (
        "_before",
        "_finished",
        "_wanted",
        "has_all_tokens",
        "has_begun",
        "has_first_token",
        "head",
        "is_done",
        "token_ids",
        "usage",
    )

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._before: Before | None = None
        self._finished: set[int] = set()
        self.token_ids: list[int] = []
        self.has_all_tokens = True
        self.has_begun = self.has_first_token = self.is_done = False
        self.head: tuple[str | None, int | None] | None = None
        self.usage: Usage | None = None

    @property
    def is_finished(self) -> bool:
        """True if every requested response has ended."""
        return self.is_done or len(self._finished) >= self._wanted.choices

    def before(self, *, is_chat: bool) -> Before:
        """Return the part of the response that the client has received."""
        answer_id, created = self.head or (None, None)
        return Before(answer_id, created, is_chat, len(self.token_ids))

    def go_on(self, before: Before) -> None:
        """Continue the stream on another engine."""
        self._before = before
        self.usage = None

    def take(self, event: bytes) -> tuple[bytes, int]:
        """Return an event as the client sees it, and its number of tokens.

        An event that is no chunk of a response is returned unchanged. Raises EngineErrorEvent.
        """
        data = data_of(event)
        if data is None or not data.startswith(b"{"):
            self.is_done |= data == DONE
            return event, 0
        self.has_first_token = True  # a chat's first chunk, with its role, comes with it
        try:
            chunk = _read(data)
            is_same = self._before is None or chunk.error_was_sent
            changed = data if is_same or self._before is None else as_before(data, self._before)
            whole = event if changed is data else b"data: " + changed + b"\n\n"
            shown = self._shown(whole, changed, chunk)
        except UNREADABLE:
            self.has_all_tokens = False
            return event, 0
        if chunk.error_was_sent and not chunk.choices:
            raise EngineErrorEvent(event)
        return shown, self._note(chunk)

    def _note(self, chunk: _Chunk) -> int:
        tokens = 0
        for choice in chunk.choices:
            tokens += choice.tokens
            self.has_all_tokens &= choice.index == 0 and (
                choice.token_ids is not None or not choice.tokens
            )
            self.token_ids += choice.token_ids or ()
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
        self.has_begun |= tokens > 0
        self.usage = chunk.usage or self.usage
        self.head = self.head or (chunk.id, chunk.created)
        return tokens

    def _shown(self, event: bytes, data: bytes, chunk: _Chunk) -> bytes:
        hides_usage = not self._wanted.usage and b'"usage"' in data
        hides_tokens = not self._wanted.token_ids and b"token_ids" in data
        if hides_usage and chunk.usage is not None and not chunk.choices:
            return b""
        if not (hides_usage or hides_tokens):
            return event
        fields: dict[str, Any] = dict(_fields(data))
        if hides_usage:
            fields.pop("usage", None)
        if hides_tokens and "choices" in fields:
            fields["choices"] = [
                {name: value for name, value in choice.items() if name not in _OURS}
                for choice in _choices(fields["choices"])
            ]
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def stream_of(asked: CompletionRequest, wanted: Wanted | None) -> StreamState | EventStream:
    """Return the state of a request's stream. `wanted`: what its client wants, if it is known."""
    event_of = asked.api.event_of
    if event_of is not None:
        return EventStream(event_of)
    return StreamState(wanted or Wanted.of(asked))
