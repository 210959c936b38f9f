"""Tokens of a text word by word, for tokenizers whose words are found by one expression.

    "How are you?<|end|>" ─added tokens─▶ "How are you?" ─expression─▶ "How", " are", " you", "?"
                                                            tokens ◀─ made ─┴─ known ─┘

A tokenizer cuts a text into words before it makes tokens, and no token reaches beyond its word. So
the tokens of a word are the same in every text, and are made once. A Python expression finds the
words in a fifth of the library's time, if it finds the same ones: the library's expression is
translated for ASCII, whose properties are known exactly. Other texts are left to the library.
"""

import re
import unicodedata
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

MOST_WORDS = 65_536
"""Limit of the known words of a tokenizer; beyond it, all are dropped."""
MOST_CHARACTERS = 64
"""Limit of a known word's characters; longer ones are made each time."""

_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression of the library's `ByteLevel`."""

_KEEPS_ASCII = (None, "NFC", "NFD", "NFKC", "NFKD")
"""The normalizers that leave ASCII as it is."""

_PROPERTY = re.compile(r"\\p\{(L|Lu|Ll|Lt|Lm|Lo|M|Mn|Mc|Me|N|Nd|Nl|No|P|S|Z)\}")
_NOTHING = "\x80"  # no character of ASCII

TRIED = (
    "\tIt's 1234567 DOn'T!?\r\n\r\n  a_b x**2 (c)  \n \x00\x0b\x0c\x1c\x1f\x7f~ we'll;\n\n  ok   "
)
"""A text whose words are compared with those of the library before an expression is used."""

Encode: TypeAlias = Callable[[Sequence[str]], list[Sequence[int]]]
"""Makes the tokens of each of several texts."""


class _Part(Struct, frozen=True):
    """A normalizer or a pre-tokenizer of a tokenizer's file."""

    type: str
    pretokenizers: list[Any] = []
    pattern: Any = None
    behavior: str = ""
    invert: bool = False
    add_prefix_space: bool = True
    use_regex: bool = True


class _File(Struct, frozen=True):
    normalizer: _Part | None = None
    pre_tokenizer: _Part | None = None
    model: Mapping[str, Any] = {}


class Added(Struct, frozen=True):
    """The added tokens of a tokenizer. `find`: finds the longest one at each position of a text.

    `plain`: those that stand for themselves, whatever is around them, with their ids as bytes.
    """

    find: re.Pattern[str]
    plain: Mapping[str, bytes]


class WordTokens:
    """The known words of one tokenizer, each with its tokens as bytes. Thread-safe."""

    __slots__ = ("_added", "_encode", "_find", "_known")

    def __init__(self, find: re.Pattern[str], added: Added | None, encode: Encode) -> None:
        self._find = find.findall
        self._added = added
        self._encode = encode
        self._known: dict[str, bytes] = {}

    def tokens(self, text: str) -> "array[int] | None":
        """Return the tokens of a text, or None if the library has to make them."""
        if not text.isascii():
            return None
        added = self._added
        if added is None or added.find.search(text) is None:
            whole = self._packed(text)
        else:
            whole = self._with_added(text, added)
        if whole is None:
            return None
        tokens = array("I")
        tokens.frombytes(whole)
        return tokens

    def _with_added(self, text: str, added: Added) -> bytes | None:
        parts, begin = [], 0
        for match in added.find.finditer(text):
            parts += [self._packed(text[begin : match.start()]), added.plain.get(match[0])]
            begin = match.end()
        parts.append(self._packed(text[begin:]))
        known = [part for part in parts if part is not None]
        return b"".join(known) if len(known) == len(parts) else None

    def _packed(self, text: str) -> bytes | None:
        """Return the tokens of a text without added tokens."""
        words, known = self._find(text), self._known
        try:
            return b"".join([known[word] for word in words])
        except KeyError:
            if len("".join(words)) != len(text):  # the expression leaves something out
                return None
            made = self._made({word for word in words if word not in known})
            self._keep(made)
            return b"".join([made.get(word) or known[word] for word in words])

    def _made(self, words: set[str]) -> dict[str, bytes]:
        missing = list(words)
        found = self._encode(missing)
        return {
            word: array("I", tokens).tobytes() for word, tokens in zip(missing, found, strict=True)
        }

    def _keep(self, made: Mapping[str, bytes]) -> None:
        """Add words to those that are known."""
        short = {word: each for word, each in made.items() if len(word) <= MOST_CHARACTERS}
        known = self._known
        self._known = short if len(known) + len(short) > MOST_WORDS else {**known, **short}


def word_expression(
    tokenizer_file: str, words_of: Callable[[str], Sequence[str]]
) -> re.Pattern[str] | None:
    """Return the expression that finds the words of texts in ASCII; None if there is none.

    `words_of`: the words as the library finds them.
    """
    try:
        file = msgspec.json.decode(tokenizer_file, type=_File)
    except msgspec.ValidationError:
        return None
    if (file.normalizer and file.normalizer.type) not in _KEEPS_ASCII:
        return None
    if file.pre_tokenizer is None or file.model.get("dropout"):
        return None
    written = _written(file.pre_tokenizer)
    translated = None if written is None else _in_ascii(written)
    if translated is None:
        return None
    try:
        found = re.compile(translated, re.ASCII)
    except re.error:
        return None
    return found if found.findall(TRIED) == list(words_of(TRIED)) else None


def _written(part: _Part) -> str | None:
    """Return the expression of a pre-tokenizer, or None if it does more than find words."""
    if part.type == "ByteLevel":
        return _BYTE_LEVEL if part.use_regex and not part.add_prefix_space else None
    if part.type != "Sequence" or len(part.pretokenizers) != 2:
        return None
    split, level = (msgspec.convert(each, _Part) for each in part.pretokenizers)
    is_split = split.type == "Split" and split.behavior == "Isolated" and not split.invert
    is_level = level.type == "ByteLevel" and not (level.use_regex or level.add_prefix_space)
    pattern = split.pattern if isinstance(split.pattern, dict) else {}
    return pattern.get("Regex") if is_split and is_level else None


def _in_ascii(pattern: str) -> str | None:
    """Translate an expression of Oniguruma for texts in ASCII; None if it says more than this."""
    parts, at, is_in_class = [], 0, False
    while at < len(pattern):
        character, property_ = pattern[at], _PROPERTY.match(pattern, at)
        if property_ is not None:
            members = _members(property_[1])
            parts.append(members if is_in_class else f"[{members}]")
            at = property_.end()
            continue
        if character == "\\":
            if pattern[at + 1 : at + 2] not in ("s", "S", "r", "n", "t", "d", "\\", "/"):
                return None
            parts.append(pattern[at : at + 2])
            at += 2
            continue
        if character in "^$.&" and not (is_in_class and pattern[at - 1] == "["):
            return None
        if character == "[" and is_in_class:
            return None
        is_in_class = character == "[" or (is_in_class and character != "]")
        parts.append(character)
        at += 1
    return "".join(parts)


def _members(category: str) -> str:
    """Return the characters of ASCII in a category, as in a class of characters."""
    found = [
        each for each in map(chr, range(128)) if unicodedata.category(each).startswith(category)
    ]
    return "".join(map(re.escape, found)) or _NOTHING
