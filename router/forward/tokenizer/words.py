"""Tokens of a text word by word, for tokenizers that never join what a space separates.

    "How are you?<|end|>" ─added tokens─▶ "How are you?" ─spaces─▶ "How", " are", " you?"
                                                    tokens ◀─ made ─┴─ known ─┘

A tokenizer cuts a text into parts before it makes tokens, and no token reaches beyond its part. If
it always cuts before a space that a word follows, and a part does not depend on what is beyond,
then the tokens of the space, the word and further white space are the same in every text: the
library makes them once. A text then takes a tenth of the library's time.
"""

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

MOST_WORDS = 65_536
"""Limit of the known words at the start of a text, and of others; beyond it, all are dropped."""
MOST_CHARACTERS = 64
"""Limit of a known word's characters; longer ones are made each time."""

_KINDS = (
    *(
        "a",
        "B",
        "é",
        "Ж",
        "ß",
        "日",
        "ก",
        "ª",
        "ʰ",
        "\u0301",
        "\u0e31",
    ),  # letters, and marks on them
    *("1", "²", "Ⅷ", "٣"),
    *("'", ".", "/", "_", "(", "«", "。", "+", "€", "\U0001f469", "\u200d", "\x00", "\u2581"),
    *("\n", "\r", "\t", "\x0b", "\x1c", "\x85", "\u00a0", "\u2028", "\u3000"),
)
"""Characters of every kind that tokenizers tell apart."""
_ENDINGS = ("'s", "'T", "'re", "'ll")
_TRIED_TEXTS, _TRIED_PARTS = 1_000, 24

_cut = re.compile(r" (?=\S)").split
"""Cuts a text at the spaces before words."""

Encode: TypeAlias = Callable[[Sequence[str]], list[Sequence[int]]]
"""Makes the tokens of each of several texts."""
WordsOf: TypeAlias = Callable[[str], Sequence[str]]
"""Returns the parts into which the library cuts a text."""


class Added(Struct, frozen=True):
    """The added tokens of a tokenizer. `find`: finds the longest one at each position of a text.

    `plain`: those that stand for themselves, whatever is around them, with their ids as bytes.
    """

    find: re.Pattern[str]
    plain: Mapping[str, bytes]


class WordTokens:
    """The known words of one tokenizer, with their tokens as bytes. Thread-safe.

    `_starts`: words at the start of a text; `_known`: words after a space, without that space.
    """

    __slots__ = ("_added", "_encode", "_known", "_starts")

    def __init__(self, added: Added | None, encode: Encode) -> None:
        self._added = added
        self._encode = encode
        self._starts: dict[str, bytes] = {}
        self._known: dict[str, bytes] = {}

    def tokens(self, text: str) -> "array[int] | None":
        """Return the tokens of a text, or None if the library has to make them."""
        added = self._added
        if added is None or added.find.search(text) is None:
            packed: bytes | None = self._packed(text)
        else:
            packed = self._with_added(text, added)
        if packed is None:
            return None
        tokens = array("I")
        tokens.frombytes(packed)
        return tokens

    def _with_added(self, text: str, added: Added) -> bytes | None:
        parts, begin = [], 0
        for match in added.find.finditer(text):
            token = added.plain.get(match[0])
            if token is None:
                return None
            parts += [self._packed(text[begin : match.start()]), token]
            begin = match.end()
        return b"".join([*parts, self._packed(text[begin:])])

    def _packed(self, text: str) -> bytes:
        """Return the tokens of a text without added tokens."""
        first, *others = text.split(" ")
        known = self._known
        try:
            packed = b"".join([known[word] for word in others])
        except KeyError:  # a new word, or several spaces together
            first, *others = _cut(text)
            packed = self._learned(others)
        if not first:  # the text is empty, or begins with a space
            return packed
        return (self._starts.get(first) or self._learned_start(first)) + packed

    def _learned(self, words: Sequence[str]) -> bytes:
        """Return the tokens of words, each after a space; make those that are new."""
        known = self._known
        missing = [word for word in dict.fromkeys(words) if word not in known]
        if not missing:
            return b"".join([known[word] for word in words])
        tokens = self._encode([f" {word}" for word in missing])
        made = {
            word: array("I", each).tobytes() for word, each in zip(missing, tokens, strict=True)
        }
        packed = b"".join([made[word] if word in made else known[word] for word in words])
        self._known = _kept(known, made)
        return packed

    def _learned_start(self, word: str) -> bytes:
        """Return the tokens of a word at the start of a text, which is new."""
        made = {word: array("I", self._encode([word])[0]).tobytes()}
        self._starts = _kept(self._starts, made)
        return made[word]


def _kept(known: dict[str, bytes], made: Mapping[str, bytes]) -> dict[str, bytes]:
    """Add words to those that are known, unless they are long; return them."""
    if len(known) + len(made) > MOST_WORDS:
        known = {}
    known.update({word: each for word, each in made.items() if len(word) <= MOST_CHARACTERS})
    return known


class _Part(Struct, frozen=True):
    """A normalizer or a pre-tokenizer of a tokenizer's file."""

    type: str
    pretokenizers: list[Any] = []
    add_prefix_space: bool = True


class _File(Struct, frozen=True):
    normalizer: _Part | None = None
    pre_tokenizer: _Part | None = None
    model: Mapping[str, Any] = {}


def keeps_words_apart(tokenizer_file: str, words_of: WordsOf) -> bool:
    """Return whether a tokenizer never joins what a space separates.

    That is so of expressions before bytes, as most models have them. They tell few kinds of
    characters apart, so the library is tried with texts of all of these.
    """
    try:
        file = msgspec.json.decode(tokenizer_file, type=_File)
        cutter = file.pre_tokenizer
        parts = cutter and (msgspec.convert(cutter.pretokenizers, list[_Part]) or [cutter])
    except msgspec.ValidationError:
        return False
    if not parts or parts[-1].type != "ByteLevel" or parts[-1].add_prefix_space:
        return False
    if any(part.type not in ("Split", "Digits") for part in parts[:-1]):
        return False
    if file.normalizer is not None and file.normalizer.type != "NFC":
        return False
    return not file.model.get("dropout") and _are_apart(words_of)


def _are_apart(words_of: WordsOf) -> bool:
    random = Random(1)
    kinds = [*_KINDS, *_ENDINGS, *" " * (len(_KINDS) // 3)]
    for _ in range(_TRIED_TEXTS):
        text = "".join(random.choices(kinds, k=_TRIED_PARTS))
        first, *others = _cut(text)
        words = [first, *(f" {word}" for word in others)]
        if list(words_of(text)) != [part for word in words for part in words_of(word)]:
            return False
    return True
