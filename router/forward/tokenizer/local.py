"""A model's tokenizer in this process, for texts and chats; each piece is tokenized once.

chat ─template─▶ text ─seams─▶ pieces ─┬─ known ──────────────┬─▶ tokens
                                       └─ tokenizers ─ known ─┘

Positions at which a text can be cut, so that its pieces have the tokens of the whole.

    …<|im_end|>\n<|im_start|>  user\nHow are you?<|im_end|>  \n<|im_start|>  assistant\n

A tokenizer first finds its added tokens in the raw text: from left to right, without overlap, the
longest at each position. The text between two of them is tokenized separately. So the text after an
added token does not depend on the text before it, if this token takes no white space with it, need
not stand alone as a word, and is found before normalisation. A text may be cut after such a token.
The following piece is tokenized with that token in front, which may affect it: some tokenizers
treat the start of a text differently.
"""

import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from secrets import token_bytes
from typing import Any

from jinja2 import TemplateError
from msgspec import Struct
from tokenizers import AddedToken as Token
from tokenizers import Tokenizer

from router.forward.apis.api import CHAT
from router.forward.request_body import CompletionRequest
from router.forward.tokenizer.chats import KINDS, Chat, Kind, read_chat
from router.forward.tokenizer.conversation import rendered
from router.forward.tokenizer.errors import NotLocalError, TokenizerFilesError
from router.forward.tokenizer.files import TokenizerFiles
from router.forward.tokenizer.template import ChatTemplate
from router.forward.tokenizer.token_cache import TokenCache, partition_key
from router.forward.tokenizer.words import Added, WordTokens, keeps_words_apart

LEAST_CHARACTERS = 512
"""Minimum length of a piece. Cuts are found from the left, so a growing text keeps its cuts."""


class AddedToken(Struct, frozen=True):
    """A text that is one token. `is_seam`: a text may be cut after it."""

    text: str
    is_seam: bool


class SplitPoints:
    """Cuts texts into pieces. `tokens`: all added tokens that are found in raw text."""

    __slots__ = ("_find", "_is_seam", "_least")

    def __init__(self, tokens: Iterable[AddedToken], least: int = LEAST_CHARACTERS) -> None:
        self._is_seam = {each.text: _may_cut(each) for each in tokens if each.text}
        pattern = _longest_of(self._is_seam)
        self._find = re.compile(pattern).finditer if any(self._is_seam.values()) else None
        self._least = least

    def pieces(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield each piece with its preceding token ("" for the first); O(text)."""
        begin, before = 0, ""
        for match in self._find(text) if self._find is not None else ():
            end = match.end()
            if end - begin >= self._least and self._is_seam[match[0]] and end < len(text):
                yield before, text[begin:end]
                begin, before = end, match[0]
        yield before, text[begin:]


def _may_cut(token: AddedToken) -> bool:
    """Return whether a text may be cut after a token.

    A token that begins with white space may be absorbed by the preceding one.
    """
    return token.is_seam and not token.text[0].isspace()


def _longest_of(texts: Iterable[str]) -> str:
    """Return a pattern that finds the longest of these texts at each position.

    It is built as a tree, because some tokenizers have thousands of added tokens.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(node: dict[str, Any]) -> str:
    """Return a node's pattern; longer alternatives are tried first."""
    literal = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        literal += re.escape(character)
    if node.keys() <= {""}:
        return literal
    ways = "|".join(re.escape(each) + _pattern(rest) for each, rest in node.items() if each)
    return f"{literal}(?:{ways}){'?' if '' in node else ''}"


class LocalTokenizer:
    """One model's tokenizer. Thread-safe. Raises TokenizerFilesError.

    `counted`: called for each prompt with the numbers of cached and new tokens. `least`: characters
    of a piece, at least.
    """

    def __init__(
        self,
        files: TokenizerFiles,
        known: TokenCache,
        counted: Callable[[int, int], None] | None = None,
        **seams: int,
    ) -> None:
        self.path = files.path
        self._special_tokens = files.special_tokens
        self._templates = {name: _template(name, files) for name in files.templates}
        self._backend = _backend(files)
        self._seams = SplitPoints(
            map(_added, self._backend.get_added_tokens_decoder().values()), **seams
        )
        self._front, self._back = self._around()
        self._known = known
        self._words = self._known_words(files)
        self._counted = counted
        self._secret = token_bytes(16)  # keyed, so that callers cannot construct collisions

    def tokens(
        self, asked: CompletionRequest, kinds: Collection[Kind] = KINDS, partition: bytes = b""
    ) -> tuple[Kind, list[int]]:
        """Return the kind and the tokens of a prompt, as `packed` does."""
        kind, tokens = self.packed(asked, kinds, partition)
        return kind, tokens.tolist()

    def packed(
        self, asked: CompletionRequest, kinds: Collection[Kind] = KINDS, partition: bytes = b""
    ) -> "tuple[Kind, array[int]]":
        """Return the kind and the tokens of a prompt of one of `kinds`.

        `partition`: the part of the cache that is used. Raises NotLocalError, PromptRefusedError.
        """
        if asked.path == CHAT:
            chat = read_chat(asked.fields)
            if chat.kind not in kinds:
                raise NotLocalError(f"{chat.kind}: engines differ")
            return chat.kind, self._chat_tokens(chat, partition)
        if "text" not in kinds:
            raise NotLocalError("text: engines differ")
        return "text", self._prompt_tokens(asked, partition)

    def _prompt_tokens(self, asked: CompletionRequest, partition: bytes) -> "array[int]":
        if not isinstance(asked.prompt, str) or asked.has_several_prompts:
            raise NotLocalError("several prompts, or no text prompt")
        value = bytes(asked.fields.get("add_special_tokens", b"true"))
        if value not in (b"true", b"false") or "truncate_prompt_tokens" in asked.fields:
            raise NotLocalError("truncate_prompt_tokens")
        return self._whole(asked.prompt, partition, adds_special_tokens=value == b"true")

    def text_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens around it."""
        return self._whole(text, b"", adds_special_tokens=True).tolist()

    def _whole(self, text: str, partition: bytes, *, adds_special_tokens: bool) -> "array[int]":
        tokens = self._pieces_tokens(text, partition_key(self._secret, partition))
        is_alone = not adds_special_tokens or not (self._front or self._back)
        return tokens if is_alone else self._front + tokens + self._back

    def _chat_tokens(self, chat: Chat, partition: bytes) -> "array[int]":
        """Return the tokens of a chat. Raises NotLocalError, PromptRefusedError."""
        name = "tool_use" if chat.tools is not None else "default"
        template = self._templates.get(name) or self._templates.get("default")
        if template is None:
            raise NotLocalError(f"no chat template beside {self.path}")
        text = rendered(chat, template, self._special_tokens)
        return self._whole(text, partition, adds_special_tokens=chat.add_special_tokens)

    def added_texts(self) -> list[str]:
        """Return the texts of the added tokens, in order of their ids."""
        tokens = sorted(self._backend.get_added_tokens_decoder().items())
        return [token.content for _, token in tokens]

    def _pieces_tokens(self, text: str, secret: bytes) -> "array[int]":
        """Return the tokens of a text; a piece is tokenized and cached with its preceding token."""
        pieces = list(self._seams.pieces(text))
        texts = [before + piece for before, piece in pieces]
        keys = [sha256(secret + each.encode()).digest()[:16] for each in texts]
        found = {key: tokens for key in keys if (tokens := self._known.get(key)) is not None}
        missing = {key: each for key, each in zip(keys, texts, strict=True) if key not in found}
        self._tokenise(missing, found)
        if len(pieces) == 1:
            tokens = found[keys[0]]
        else:
            tokens = array("I")
            for (before, _), key in zip(pieces, keys, strict=True):
                tokens.extend(found[key][1:] if before else found[key])
        unknown = sum(len(found[key]) for key in missing)
        if self._counted is not None:
            self._counted(max(0, len(tokens) - unknown), unknown)
        return tokens

    def _tokenise(self, missing: dict[bytes, str], found: "dict[bytes, array[int]]") -> None:
        """Tokenize the missing pieces: by their words, or those that have none as one batch.

        A batch releases the GIL even for few pieces.
        """
        left = {}
        for key, text in missing.items():
            tokens = None if self._words is None else self._words.tokens(text)
            if tokens is None:
                left[key] = text
            else:
                found[key] = tokens
        if left:
            made = self._encode(list(left.values()))
            found |= {key: array("I", each) for key, each in zip(left, made, strict=True)}
        for key in missing:
            self._known.put(key, found[key])

    def _encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        several = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in several]

    def _known_words(self, files: TokenizerFiles) -> WordTokens | None:
        """Return the tokens of words, if the tokenizer makes them one by one."""
        cutter = self._backend.pre_tokenizer
        if cutter is None:
            return None

        def words_of(text: str) -> list[str]:
            return [text[slice(*span)] for _, span in cutter.pre_tokenize_str(text)]

        if not keeps_words_apart(files.tokenizer, words_of):
            return None
        return WordTokens(self._all_added(), self._encode)

    def _all_added(self) -> Added | None:
        tokens = self._backend.get_added_tokens_decoder()
        plain = {
            each.content: array("I", [token_id]).tobytes()
            for token_id, each in tokens.items()
            if not (each.normalized or each.lstrip or each.rstrip or each.single_word)
        }
        texts = [each.content for each in tokens.values() if each.content]
        return Added(re.compile(_longest_of(texts)), plain) if texts else None

    def _around(self) -> "tuple[array[int], array[int]]":
        """Return the tokens that belong before and after a text."""
        (encoding,) = self._backend.encode_batch_fast(["a"])
        own = [at for at, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        if not own:  # its vocabulary lacks "a"
            return array("I", encoding.ids), array("I")
        return array("I", encoding.ids[: own[0]]), array("I", encoding.ids[own[-1] + 1 :])


def _template(name: str, files: TokenizerFiles) -> ChatTemplate:
    try:
        return ChatTemplate(files.templates[name])
    except TemplateError as error:
        reason = f"chat template {name!r}: {error}"
        raise TokenizerFilesError(files.path, reason, "a template of Jinja") from error


def _backend(files: TokenizerFiles) -> Tokenizer:
    try:
        backend = Tokenizer.from_str(files.tokenizer)
    except Exception as error:
        raise TokenizerFilesError(files.path, str(error), "a file of `tokenizers`") from error
    backend.no_padding()
    backend.no_truncation()
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for extra in files.extra_tokens:
        if extra.content not in known:
            flags = {name: getattr(extra, name) for name in extra.__struct_fields__[1:]}
            backend.add_tokens([Token(extra.content, **flags)])
    return backend


def _added(token: Any) -> AddedToken:
    """Return an added token; raw text cannot be cut at one that matches normalised text."""
    takes_more = token.lstrip or token.rstrip or token.single_word
    return AddedToken("" if token.normalized else token.content, not takes_more)
