"""A model's own tokenizer, in this process: of texts and of chats, each piece tokenised once.

chat ─template─▶ text ─seams─▶ pieces ─┬─ known ──────────────┬─▶ tokens
                                       └─ tokenizers ─ known ─┘
"""

from array import array
from collections.abc import Callable, Collection
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken as Token
from tokenizers import Tokenizer

from router.forward.bodies import CHAT, Asked
from router.forward.tokenizer.chats import KINDS, Chat, Kind, read_chat
from router.forward.tokenizer.conversation import rendered
from router.forward.tokenizer.errors import NotLocalError, TokenizerFilesError
from router.forward.tokenizer.files import TokenizerFiles
from router.forward.tokenizer.known_pieces import KnownPieces
from router.forward.tokenizer.seams import AddedToken, Seams
from router.forward.tokenizer.template import ChatTemplate


class LocalTokenizer:
    """One model's. May be used by several threads at once. Raises TokenizerFilesError.

    `counted` is told of each prompt: how many tokens were known, and how many were made; `least`:
    characters of a piece.
    """

    def __init__(
        self,
        files: TokenizerFiles,
        known: KnownPieces,
        counted: Callable[[int, int], None] | None = None,
        **seams: int,
    ) -> None:
        self.path = files.path
        self._special_tokens = files.special_tokens
        self._templates = {name: _template(name, files) for name in files.templates}
        self._backend = _backend(files)
        self._seams = Seams(map(_added, self._backend.get_added_tokens_decoder().values()), **seams)
        self._front, self._back = self._around()
        self._known = known
        self._counted = counted
        self._secret = token_bytes(16)  # or who knows the hash could make two pieces one

    def tokens(self, asked: Asked, kinds: Collection[Kind] = KINDS) -> tuple[Kind, list[int]]:
        """Of a prompt, and what kind it is; only of these kinds. Raises NotLocalError,
        PromptRefusedError.
        """
        if asked.path == CHAT:
            chat = read_chat(asked.fields)
            if chat.kind not in kinds:
                raise NotLocalError(f"{chat.kind}: engines say otherwise")
            return chat.kind, self.chat_tokens(chat)
        if "text" not in kinds:
            raise NotLocalError("text: engines say otherwise")
        return "text", self._prompt_tokens(asked)

    def _prompt_tokens(self, asked: Asked) -> list[int]:
        if not isinstance(asked.prompt, str) or asked.has_several_prompts:
            raise NotLocalError("several prompts, or none in words")
        said = bytes(asked.fields.get("add_special_tokens", b"true"))
        if said not in (b"true", b"false") or "truncate_prompt_tokens" in asked.fields:
            raise NotLocalError("truncate_prompt_tokens")
        return self.text_tokens(asked.prompt, adds_special_tokens=said == b"true")

    def text_tokens(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        """Of a text as it is, and what belongs around one."""
        tokens = self._pieces_tokens(text)
        return [*self._front, *tokens, *self._back] if adds_special_tokens else tokens

    def chat_tokens(self, chat: Chat) -> list[int]:
        """Of a chat. Raises NotLocalError, PromptRefusedError."""
        name = "tool_use" if chat.tools is not None else "default"
        template = self._templates.get(name) or self._templates.get("default")
        if template is None:
            raise NotLocalError(f"no chat template beside {self.path}")
        text = rendered(chat, template, self._special_tokens)
        return self.text_tokens(text, adds_special_tokens=chat.add_special_tokens)

    def added_texts(self) -> list[str]:
        """Of its added tokens, in order of their ids."""
        tokens = sorted(self._backend.get_added_tokens_decoder().items())
        return [token.content for _, token in tokens]

    def _pieces_tokens(self, text: str) -> list[int]:
        """A piece is tokenised, and known, with the token that it is behind of."""
        pieces = list(self._seams.pieces(text))
        texts = [before + piece for before, piece in pieces]
        keys = [blake2b(each.encode(), digest_size=16, key=self._secret).digest() for each in texts]
        found = {key: tokens for key in keys if (tokens := self._known.get(key)) is not None}
        missing = {key: each for key, each in zip(keys, texts, strict=True) if key not in found}
        self._tokenise(missing, found)
        tokens = array("I")
        for (before, _), key in zip(pieces, keys, strict=True):
            tokens.extend(found[key][1:] if before else found[key])
        unknown = sum(len(found[key]) for key in missing)
        if self._counted is not None:
            self._counted(max(0, len(tokens) - unknown), unknown)
        return tokens.tolist()

    def _tokenise(self, missing: dict[bytes, str], found: "dict[bytes, array[int]]") -> None:
        """As a batch, however few: then others may run meanwhile."""
        if missing:
            several = self._backend.encode_batch_fast(
                list(missing.values()), add_special_tokens=False
            )
            for key, encoding in zip(missing, several, strict=True):
                found[key] = array("I", encoding.ids)
                self._known.put(key, found[key])

    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that belong before and behind a text."""
        (encoding,) = self._backend.encode_batch_fast(["a"])
        own = [at for at, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        if not own:  # it knows no "a"
            return encoding.ids, []
        return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]


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
    """Those that are looked for in normalised text are nothing that raw text can be cut at."""
    takes_more = token.lstrip or token.rstrip or token.single_word
    return AddedToken("" if token.normalized else token.content, not takes_more)
