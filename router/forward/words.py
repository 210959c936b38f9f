"""Requests in words that came before: but for the prompt, nothing of them is read or decided anew.

    {"model":"m","prompt": [1,2,3] ,"max_tokens":1}
    ├──── before ────┤├ prompt ┤├──── behind ─────┤

What was read once of a body like this, under the same head, holds for every prompt between the same
bytes: that is tried out with another one before it is relied upon. Prompts are tokens, which the
router reads, or a text without escapes.
"""

from typing import Any

from msgspec import Raw, structs

from router.errors import KvRouterError
from router.forward.bodies import UNREADABLE, Asked, OpenAiPath, prompt_of, read_asked
from router.forward.migration import is_migratable
from router.forward.stream import Wanted
from router.protocol.requests import SelectRequest
from router.security.caller import Caller

MOST_WORDS = 4
"""Bodies that are remembered of one head."""
MOST_BYTES = 4096
"""Of a body without its prompt."""

_TRIED = {b"[": b"[7,77,7]", b'"': b'"7 77 7"'}


class Words:
    """What follows from a request's words, whatever its prompt. Of a caller is remembered what the
    router is asked for it.
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

    def __init__(self, asked: Asked, before: bytes, behind: bytes) -> None:
        """`asked`: with another prompt, which engines' bodies are made of."""
        self._asked = asked
        self._before = before
        self._behind = behind
        self._request: SelectRequest | None = None
        self._caller: Caller | None = None
        self._bodies: dict[tuple[str, ...], tuple[bytes, bytes] | None] = {}
        self.is_migratable = is_migratable(asked)
        self.wanted = Wanted.of(asked)

    def prompt_in(self, body: bytes) -> bytes | None:
        """The prompt, as it is written, if these words are around it."""
        if not (body.startswith(self._before) and body.endswith(self._behind)):
            return None
        start, end = len(self._before), len(body) - len(self._behind)
        if body.startswith(b"[", start):
            is_prompt = body.find(b"]", start) == end - 1 and body[start + 1 : start + 2].isdigit()
        else:
            is_text = body.startswith(b'"', start) and body.find(b'"', start + 1) == end - 1
            is_prompt = is_text and body.find(b"\\", start, end) < 0
        return body[start:end] if is_prompt else None

    def asked_with(self, prompt: bytes) -> Asked:
        """The request with this prompt. Raises InvalidFieldError for what is no text."""
        raw, like = Raw(prompt), self._asked
        read = structs.replace(like.read, prompt=raw)
        return Asked(like.path, {**like.fields, "prompt": raw}, read, prompt_of(prompt))

    def request_of(self, caller: Caller, token_ids: Any) -> SelectRequest | None:
        """What the router is asked for a prompt of this caller; None: nobody knows yet."""
        if self._request is None or self._caller is not caller:
            return None
        request: SelectRequest = self._request.__copy__()  # type: ignore[attr-defined]
        structs.force_setattr(request, "token_ids", token_ids)
        return request

    def note_request(self, caller: Caller, request: SelectRequest) -> None:
        """This was the router asked for a prompt of this caller."""
        self._caller, self._request = caller, structs.replace(request, token_ids=())

    def to_engine(self, asked: Asked, **fields: Any) -> bytes:
        """`asked.to_engine`, of a request in these words. What a field says is always the same."""
        names = tuple(fields)
        if names not in self._bodies:
            tried, body = bytes(self._asked.read.prompt), self._asked.to_engine(**fields)
            before, _, behind = body.partition(tried)
            self._bodies[names] = (before, behind) if body.count(tried) == 1 else None
        around = self._bodies[names]
        if around is None:
            return asked.to_engine(**fields)
        return b"%b%b%b" % (around[0], bytes(asked.read.prompt), around[1])


def read(path: OpenAiPath, body: bytes, known: list[Words] | None) -> tuple[Asked, Words | None]:
    """A request, and its words, if they are worth it: those under its head, or None where it is not
    known itself. Raises what `read_asked` raises.
    """
    for words in known or ():
        prompt = words.prompt_in(body)
        if prompt is not None:
            try:
                return words.asked_with(prompt), words
            except UNREADABLE:  # what is wrong is said of the whole
                break
    asked = read_asked(path, body)
    words_of_it = None if known is None else _learned(asked, body)
    if known is not None and words_of_it is not None:
        del known[MOST_WORDS - 1 :]
        known.insert(0, words_of_it)
    return asked, words_of_it


def _learned(asked: Asked, body: bytes) -> Words | None:
    """The words of a body, if another prompt could stand in them."""
    prompt = bytes(asked.read.prompt)
    tried = _TRIED.get(prompt[:1])
    if tried is None or asked.prompt is None or asked.read.nvext is not None:
        return None
    if len(body) - len(prompt) > MOST_BYTES:
        return None
    before, _, behind = body.partition(prompt)
    try:
        other = read_asked(asked.path, b"%b%b%b" % (before, tried, behind))
    except KvRouterError:
        return None
    words = Words(other, before, behind)
    is_same = bytes(other.read.prompt) == tried and _rest(other) == _rest(asked)
    return words if is_same and words.prompt_in(body) == prompt else None


def _rest(asked: Asked) -> dict[str, bytes]:
    return {name: bytes(value) for name, value in asked.fields.items() if name != "prompt"}
