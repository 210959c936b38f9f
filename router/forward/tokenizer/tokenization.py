"""Tokenization of prompts: the tokens must equal the engines', because prefixes match by tokens.

    texts    a local tokenizer, if engines agree ─or─▶ an engine's `/tokenize` ─or─▶ an estimate
    chats    the same, with an engine's `/render` before `/tokenize`
    Messages, Responses    as chats, by the rules of their engine, which confirms it

If engines repeatedly count another number of tokens, no overlap is assumed for such prompts any
more.
"""

import asyncio
import logging
from collections.abc import Sequence

from msgspec import structs

from router.client import Usage
from router.forward.apis.api import CHAT, COMPLETIONS, MESSAGES
from router.forward.apis.chats.as_chat import as_chat
from router.forward.apis.chats.chat_form import ChatForm, NoChatError
from router.forward.apis.chats.dialect import Dialect
from router.forward.metrics import ForwardMetrics
from router.forward.placement import PromptTokens, estimated
from router.forward.request_body import CompletionRequest
from router.forward.tokenizer.engine_client import Key, Rendered
from router.forward.tokenizer.engine_tokens import Engine, EngineTokens
from router.forward.tokenizer.errors import NotLocalError
from router.forward.tokenizer.local_tokens import LocalTokens
from router.forward.tokenizer.media import (
    FILLERS,
    block_mm_infos,
    common_length,
    unknown_from,
    until_media,
)
from router.forward.tokenizer.referee import Referee, RefereeKey, referee_key, with_
from router.runtime.process.json_bodies import THREAD_BYTES

log = logging.getLogger(__name__)

DISAGREEMENTS = 3
"""Mismatches in a row, per model and route, after which prompts are not trusted."""


class Agreement:
    """The agreement of engines with the number of prompt tokens, by model and route."""

    __slots__ = ("_missed",)

    def __init__(self) -> None:
        self._missed: dict[tuple[str, str], int] = {}

    def note(self, asked: CompletionRequest, tokens: int, counted: int) -> bool:
        """Record an engine's count. Returns whether it matches; a match restores trust."""
        key = (asked.model, asked.path)
        if tokens == counted:
            self._missed.pop(key, None)
            return True
        self._missed[key] = min(self._missed.get(key, 0) + 1, DISAGREEMENTS)
        return False

    def doubted(self) -> list[tuple[str, str]]:
        """Return model and route of the prompts that are not trusted."""
        return sorted(key for key, times in self._missed.items() if times >= DISAGREEMENTS)

    def is_doubted(self, asked: CompletionRequest) -> bool:
        """Return whether the tokens of this model's prompts are not trusted."""
        return self._missed.get((asked.model, asked.path), 0) >= DISAGREEMENTS


class Tokenization:
    """Finds the tokens of prompts."""

    def __init__(self, engines: EngineTokens, local: LocalTokens, metrics: ForwardMetrics) -> None:
        self._of_engines = engines
        self._local = local
        self._metrics = metrics
        self.agreement = Agreement()
        self.referee = Referee()

    async def tokens(
        self, asked: CompletionRequest, partition: bytes, key: Key = None
    ) -> PromptTokens:
        """Return a prompt's tokens, or an estimate. Raises PromptRefusedError.

        `partition`: the part of the caches that is used, of `partition_of`. `key`: the client's,
        for engines that want one.
        """
        known_tokens = asked.known_tokens
        if known_tokens is not None:
            return PromptTokens(known_tokens)
        if not asked.api.computes:
            return estimated(asked)
        tokens = await self._local_tokens(asked, partition)
        if tokens is None and asked.path == COMPLETIONS:
            tokens = await self._of_engines.tokenized(asked, partition, key)
        elif tokens is None:
            return await self._conversation(asked, partition, key)
        if tokens is None:
            return estimated(asked)
        is_cut = asked.path == COMPLETIONS and "truncate_prompt_tokens" in asked.fields
        is_certain = not self.agreement.is_doubted(asked) and not is_cut
        return PromptTokens(tokens, is_certain, are_counted=not asked.has_several_prompts)

    async def _local_tokens(
        self, asked: CompletionRequest, partition: bytes
    ) -> Sequence[int] | None:
        """Return the tokens of a text or a chat, or None if only engines can tokenize it."""
        try:
            tokens = await self._local.tokens(asked, partition)
        except NotLocalError:
            return None
        self._count("local")
        return tokens

    # ── Chats, Messages, Responses ───────────────────────────────────────────────────────────────

    async def _conversation(
        self, asked: CompletionRequest, partition: bytes, key: Key
    ) -> PromptTokens:
        engine = await self._of_engines.engine(asked.model)
        if engine is None:
            self._count("failed")
            return estimated(asked)
        form = await _form(asked, await self._of_engines.dialect(engine, key))
        about = None if form is None else referee_key(asked, form)
        is_denied = about is not None and self.referee.verdict(about) == "differs"
        tokens = None
        if form is not None and not form.has_images and not is_denied:
            tokens = await self._local_tokens(form.chat, partition)
        if tokens is None:
            rendered = await self._of_engines.rendered(asked, engine, key)
            if rendered is not None:
                return self._as_rendered(asked, rendered, engine)
        if tokens is None and form is not None:
            tokens = await self._of_engines.tokenized(form.chat, partition, key)
        if tokens is None or form is None or about is None:
            return estimated(asked)
        if form.keeps_last_tokens is not None:
            tokens = tokens[-form.keeps_last_tokens :]
        await self._ask_referee(asked, about, len(tokens), engine, key)
        is_trusted = self.referee.is_trusted(about, is_proven=form.is_proven)
        is_certain = is_trusted and not self.agreement.is_doubted(asked)
        is_plain = asked.path == CHAT and not form.features
        found = PromptTokens(tokens, is_certain, True, confirms=None if is_plain else about)
        return await self._with_media(found, form, partition, engine, key)

    def _as_rendered(
        self, asked: CompletionRequest, rendered: Rendered, engine: Engine
    ) -> PromptTokens:
        """Return the prompt that an engine has made of a request."""
        is_certain = not self.agreement.is_doubted(asked)
        tokens = PromptTokens(rendered.token_ids, is_certain, are_counted=True)
        if rendered.features is None:
            return tokens
        infos = block_mm_infos(rendered.features, engine.block_size)
        if infos is None:
            return structs.replace(tokens, are_certain=False)
        return structs.replace(tokens, block_mm_infos=infos or None)

    async def _ask_referee(
        self, asked: CompletionRequest, about: RefereeKey, tokens: int, engine: Engine, key: Key
    ) -> None:
        """Have the engine count a prompt of Messages, if that is due."""
        if asked.path != MESSAGES or not self.referee.is_due(about):
            return
        counted = await self._of_engines.counted(asked, engine, key)
        if counted is not None:
            self._note_verdict(about, agrees=counted == tokens)

    def _note_verdict(self, about: RefereeKey, *, agrees: bool) -> None:
        if self.referee.note(about, agrees=agrees):
            model, path, features = about
            log.warning(
                "engines of %r count other tokens at %s%s than this process: no overlap is assumed "
                "for these requests; vLLM with --enable-scale-out says which tokens",
                model, path, with_(features),
            )  # fmt: skip

    async def _with_media(
        self, found: PromptTokens, form: ChatForm, partition: bytes, engine: Engine, key: Key
    ) -> PromptTokens:
        """Return a prompt of which nothing from its first image on is taken as cached.

        The tokens are not enough: they are the same for all images.
        """
        if not form.has_images or not found.are_certain:
            return found
        known = len(found.token_ids)
        for filler in FILLERS:
            text = until_media(form.chat, filler)
            tokens = await self._of_engines.tokenized(text, partition, key)
            known = min(known, common_length(found.token_ids, tokens or ()))
        infos = unknown_from(known, engine.block_size)
        return structs.replace(found, block_mm_infos=infos)

    # ── What engines report ──────────────────────────────────────────────────────────────────────

    def note(
        self,
        asked: CompletionRequest,
        tokens: int,
        usage: Usage,
        confirms: RefereeKey | None = None,
    ) -> None:
        """Compare an engine's reported usage with the number of tokens."""
        if tokens != usage.prompt_tokens:
            self._count("disagreed")
        if confirms is not None:
            self._note_verdict(confirms, agrees=tokens == usage.prompt_tokens)
            return
        was_doubted = self.agreement.is_doubted(asked)
        self.agreement.note(asked, tokens, usage.prompt_tokens)
        if self.agreement.is_doubted(asked) and not was_doubted:
            log.warning(
                "engines of %r count %d prompt tokens, this process %d, repeatedly: no overlap is "
                "assumed for its prompts at %s; check the tokenizer of this model",
                asked.model, usage.prompt_tokens, tokens, asked.path,
            )  # fmt: skip

    def described(self) -> dict[str, object]:
        """Return the agreement between tokenizers and engines, for `/ready`."""
        doubted = [f"{model}: {path}" for model, path in self.agreement.doubted()]
        closed = [
            f"{model}: /render is switched off: of prompts with images nothing from the first "
            "image on is taken as cached; start vLLM with --enable-scale-out"
            for model in self._of_engines.closed_models()
        ]
        problems = [*self.referee.problems(), *closed]
        return {**self._local.described(), "miscounted": doubted, "prompts": problems}

    def _count(self, outcome: str) -> None:
        self._metrics.tokenizations.count(outcome)


async def _form(asked: CompletionRequest, dialect: Dialect) -> ChatForm | None:
    """Return a request as a chat; None if only engines can make its prompt."""
    try:
        if asked.size_bytes > THREAD_BYTES:
            return await asyncio.to_thread(as_chat, asked, dialect)
        return as_chat(asked, dialect)
    except NoChatError:
        return None
