"""Where a text can be cut, so that its pieces have the tokens of the whole.

    …<|im_end|>\\n<|im_start|>  user\\nHow are you?<|im_end|>  \\n<|im_start|>  assistant\\n

A tokenizer looks first for its added tokens in the raw text: from left to right, never overlapping,
at each place the longest. What lies between two of them is tokenised by itself. So what is behind
an added token does not depend on what is before it, where this token takes no white space with it,
need not stand alone as a word, and is looked for before anything is normalised. Behind such a token
a text may be cut; the piece that follows begins with that token again, since what it is behind of
may matter to it (the first piece of a text, some tokenizers read otherwise).
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

LEAST_CHARACTERS = 512
"""Of a piece. Cuts are found from the left, so a text that grows is cut where it was before."""


class AddedToken(Struct, frozen=True):
    """A text that is one token. `is_seam`: a text may be cut behind it."""

    text: str
    is_seam: bool


class Seams:
    """Cuts texts. `tokens`: all that are looked for in raw text."""

    __slots__ = ("_find", "_is_seam", "_least")

    def __init__(self, tokens: Iterable[AddedToken], least: int = LEAST_CHARACTERS) -> None:
        self._is_seam = {each.text: _may_cut(each) for each in tokens if each.text}
        pattern = _longest_of(self._is_seam)
        self._find = re.compile(pattern).finditer if any(self._is_seam.values()) else None
        self._least = least

    def pieces(self, text: str) -> Iterator[tuple[str, str]]:
        """The token that a piece is behind of ("" for the first), and the piece; O(text)."""
        begin, before = 0, ""
        for match in self._find(text) if self._find is not None else ():
            end = match.end()
            if end - begin >= self._least and self._is_seam[match[0]] and end < len(text):
                yield before, text[begin:end]
                begin, before = end, match[0]
        yield before, text[begin:]


def _may_cut(token: AddedToken) -> bool:
    """What begins with white space may be part of what another takes with it."""
    return token.is_seam and not token.text[0].isspace()


def _longest_of(texts: Iterable[str]) -> str:
    """A pattern that finds the longest of these at each place; in a tree, for there are thousands
    in some tokenizers.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(node: dict[str, Any]) -> str:
    """Deepest first: a group that may be left out is tried before it is."""
    literal = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        literal += re.escape(character)
    if node.keys() <= {""}:
        return literal
    ways = "|".join(re.escape(each) + _pattern(rest) for each, rest in node.items() if each)
    return f"{literal}(?:{ways}){'?' if '' in node else ''}"
