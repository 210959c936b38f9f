"""Templates of completion requests: bodies that differ in the prompt only are parsed once.

A template is learned from the second request under the same headers. It keeps the bytes before and
after the prompt, and everything that follows from them.
"""

from typing import Any

from msgspec import Raw

from router.errors import KvRouterError
from router.forward.migration import is_migratable
from router.forward.request_body import (
    ABSENT,
    CompletionRequest,
    prompt_of,
    read_completion_request,
)
from router.forward.stream_state import Wanted
from router.protocol.requests import SelectRequest
from router.protocol.values import UNREADABLE
from router.runtime.security.caller import Caller

MOST_WORDS = 4
"""Limit of templates per request head; the oldest is dropped."""
MOST_BYTES = 4096
"""Limit of a template's bytes; a longer body is parsed each time."""

_TRIED = {b"[": b"[7,77,7]", b'"': b'"7 77 7"'}


class RequestTemplate:
    """The parts of a request that do not depend on its prompt.

    For the last caller it also keeps the request to the router.
    """

    __slots__ = (
        "_asked",
        "_before",
        "_behind",
        "_bodies",
        "_caller",
        "_request",
        "is_migratable",
        "wanted",
    )

    def __init__(self, asked: CompletionRequest, before: bytes, behind: bytes) -> None:
        """Initialise from a request with another prompt, from which bodies are made."""
        self._asked = asked
        self._before = before
        self._behind = behind
        self._request: SelectRequest | None = None
        self._caller: Caller | None = None
        self._bodies: dict[tuple[str, ...], tuple[bytes, bytes] | None] = {}
        self.is_migratable = is_migratable(asked)
        self.wanted = Wanted.of(asked)

    def prompt_in(self, body: bytes) -> bytes | None:
        """Return the prompt as JSON text if a body matches the template, else None."""
        if not (body.startswith(self._before) and body.endswith(self._behind)):
            return None
        start, end = len(self._before), len(body) - len(self._behind)
        if body.startswith(b"[", start):
            is_prompt = body.find(b"]", start) == end - 1 and body[start + 1 : start + 2].isdigit()
        else:
            is_text = body.startswith(b'"', start) and body.find(b'"', start + 1) == end - 1
            is_prompt = is_text and body.find(b"\\", start, end) < 0
        return body[start:end] if is_prompt else None

    def asked_with(self, prompt: bytes) -> CompletionRequest:
        """Return the request with this prompt. Raises InvalidFieldError for an invalid text."""
        like = self._asked
        fields = {**like.fields, "prompt": Raw(prompt)}
        return CompletionRequest(like.path, fields, like.read, prompt_of(prompt))

    def request_of(self, caller: Caller) -> SelectRequest | None:
        """Return this caller's request to the router, without tokens. Returns None if unknown."""
        return self._request if self._caller is caller else None

    def note_request(self, caller: Caller, request: SelectRequest) -> None:
        """Keep the request to the router for this caller."""
        self._caller, self._request = caller, request

    def to_engine(self, asked: CompletionRequest, **fields: Any) -> bytes:
        """Return `asked.to_engine(...)` for a request of this template.

        A field has the same value in every call.
        """
        names = tuple(fields)
        if names not in self._bodies:
            tried, body = bytes(self._asked.fields["prompt"]), self._asked.to_engine(**fields)
            before, _, behind = body.partition(tried)
            self._bodies[names] = (before, behind) if body.count(tried) == 1 else None
        around = self._bodies[names]
        if around is None:
            return asked.to_engine(**fields)
        return b"%b%b%b" % (around[0], bytes(asked.fields["prompt"]), around[1])


def read(
    path: str, body: bytes, known: list[RequestTemplate] | None
) -> tuple[CompletionRequest, RequestTemplate | None]:
    """Parse a body. Returns the request, and its template if it has one.

    `known`: the templates of its request head, which a new one is added to; None to learn none.
    Raises what `read_completion_request` raises.
    """
    for words in known or ():
        prompt = words.prompt_in(body)
        if prompt is not None:
            try:
                return words.asked_with(prompt), words
            except UNREADABLE:  # the error has to describe the whole body
                break
    asked = read_completion_request(path, body)
    words_of_it = None if known is None else _learned(asked, body)
    if known is not None and words_of_it is not None:
        del known[MOST_WORDS - 1 :]
        known.insert(0, words_of_it)
    return asked, words_of_it


def _learned(asked: CompletionRequest, body: bytes) -> RequestTemplate | None:
    """Return the template of a body. Returns None if the prompt cannot be replaced in it."""
    prompt = bytes(asked.fields.get("prompt", ABSENT))
    tried = _TRIED.get(prompt[:1])
    if tried is None or asked.prompt is None or asked.read.nvext is not None:
        return None
    if len(body) - len(prompt) > MOST_BYTES:
        return None
    before, _, behind = body.partition(prompt)
    try:
        other = read_completion_request(asked.path, b"%b%b%b" % (before, tried, behind))
    except KvRouterError:
        return None
    words = RequestTemplate(other, before, behind)
    is_same = bytes(other.fields["prompt"]) == tried and _rest(other) == _rest(asked)
    return words if is_same and words.prompt_in(body) == prompt else None


def _rest(asked: CompletionRequest) -> dict[str, bytes]:
    return {name: bytes(value) for name, value in asked.fields.items() if name != "prompt"}
