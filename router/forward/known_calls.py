"""Heads of completions that came before, and what came under them.

A head that says nothing of the single request but its id is known by its bytes, if its request came
in one piece; any other is parsed, and its headers are looked for. The second request under the same
headers begins to tell the words that will come again.
"""

from typing import TypeAlias

from router.forward.bodies import OpenAiPath
from router.forward.headers import REQUEST_ID, Pairs
from router.forward.words import Words
from router.known_heads import KnownHeads
from router.process.request_ids import TRACEPARENT

MOST_HEADS = 256

_TRACEPARENT = TRACEPARENT.encode()
_OF_ONE_REQUEST = (REQUEST_ID, _TRACEPARENT, b"content-length")

KnownHead: TypeAlias = tuple[OpenAiPath, Pairs, list[Words]]
"""Route, headers without those of a single request, and words that came under them."""


class KnownCalls:
    """Heads of completions."""

    __slots__ = ("_heads", "_words", "find")

    def __init__(self) -> None:
        self._heads: KnownHeads[KnownHead] = KnownHeads(MOST_HEADS)
        self._words: dict[tuple[OpenAiPath, Pairs], list[Words]] = {}
        self.find = self._heads.find

    def words_under(self, path: OpenAiPath, headers: Pairs, message: bytes) -> list[Words] | None:
        """Words that came under these headers; None: nothing has yet. `message`: all of the bytes
        of the request, and nothing else, if that is so.
        """
        said = [value for name, value in headers if name == REQUEST_ID]
        others = tuple([pair for pair in headers if pair[0] not in _OF_ONE_REQUEST])
        words = self._words.get((path, others))
        if words is None:
            if len(self._words) >= MOST_HEADS:
                self._words.clear()
            self._words[path, others] = []
        elif message and len(said) < 2 and all(name != _TRACEPARENT for name, _ in headers):
            head = (path, others, words)
            self._heads.remember(message, head, said[0] if said else b"")
        return words
