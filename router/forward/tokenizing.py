"""The tokens of what clients write: the engines' own, for prefixes are found by tokens.

    a tokenizer of our own, if engines agree ─or─▶ an engine's `/tokenize` ─or─▶ a guess

What an engine said is kept: a text that comes again is not asked for again. Where an engine counts
otherwise than was said here, no overlap is claimed any more.
"""

import asyncio
import logging
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from secrets import token_bytes

from router.client import RouterClient, SelectRequest, Usage
from router.errors import KvRouterError
from router.forward.asking_tokens import TokensOfEngines, question
from router.forward.bodies import CHAT, Asked
from router.forward.metrics import ForwardMetrics
from router.forward.placing import PromptTokens, guessed
from router.forward.tokenizer.chats import read_messages
from router.forward.tokenizer.errors import NotLocalError
from router.forward.tokenizer.known_pieces import KnownPieces
from router.forward.tokenizer.local_tokens import LocalTokens
from router.process.bodies import THREAD_BYTES

log = logging.getLogger(__name__)

DISAGREEMENTS = 3
"""In a row, of one model and route; then its prompts are guessed."""


class Agreement:
    """Whether engines count a prompt's tokens as was said here, by model and route."""

    __slots__ = ("_missed",)

    def __init__(self) -> None:
        self._missed: dict[tuple[str, str], int] = {}

    def note(self, asked: Asked, tokens: int, counted: int) -> bool:
        """An engine counted so many; whether it is the same. One that agrees is believed again."""
        key = (asked.model, asked.path)
        if tokens == counted:
            self._missed.pop(key, None)
            return True
        self._missed[key] = min(self._missed.get(key, 0) + 1, DISAGREEMENTS)
        return False

    def doubted(self) -> list[tuple[str, str]]:
        """Model and route of prompts that are not to be believed."""
        return sorted(key for key, times in self._missed.items() if times >= DISAGREEMENTS)

    def is_doubted(self, asked: Asked) -> bool:
        """Whether what is said of this model's prompts is not to be believed."""
        return self._missed.get((asked.model, asked.path), 0) >= DISAGREEMENTS


class Tokenizing:
    """Finds the tokens of prompts."""

    def __init__(
        self,
        router: RouterClient,
        engines: TokensOfEngines,
        metrics: ForwardMetrics,
        routing_group: str,
        known: KnownPieces,
        local: LocalTokens,
    ) -> None:
        self._router = router
        self._of_engines = engines
        self._metrics = metrics
        self._routing_group = routing_group
        self._local = local
        self._known = known
        self._secret = token_bytes(16)  # or who knows the hash could make two prompts one
        self._engines: dict[str, str] = {}
        self.agreement = Agreement()

    async def tokens(self, asked: Asked) -> PromptTokens:
        """A prompt's tokens; guessed where nobody says them. Raises PromptRefusedError."""
        known_tokens = asked.known_tokens
        if known_tokens is not None:
            return PromptTokens(known_tokens)
        tokens: Sequence[int] | None
        try:
            tokens = await self._local.tokens(asked)
            self._count("local")
        except NotLocalError:
            tokens = await self._tokens_of_engine(asked)
        if tokens is None:
            return guessed(asked)
        is_certain = not self.agreement.is_doubted(asked)
        return PromptTokens(tokens, is_certain, are_counted=not asked.has_several_prompts)

    async def _tokens_of_engine(self, asked: Asked) -> Sequence[int] | None:
        """Remembered, or asked; None where no engine says them."""
        if asked.size_bytes > THREAD_BYTES:
            body, key = await asyncio.to_thread(self._question, asked)
        else:
            body, key = self._question(asked)
        known = self._known.get(key)
        self._count("asked" if known is None else "known")
        if known is not None:
            return known
        try:
            said = await self._of_engines.ask(await self._engine(asked.model), body)
        except KvRouterError:
            self._engines.pop(asked.model, None)
            self._count("failed")
            return None
        tokens = array("I", said)
        self._known.put(key, tokens)
        return tokens

    def _question(self, asked: Asked) -> tuple[bytes, bytes]:
        """What engines are asked, and what is remembered of it. Raises PromptRefusedError."""
        if asked.path == CHAT:  # or else the engine would be asked what cannot be
            read_messages(bytes(asked.fields["messages"]))
        body = question(asked)
        return body, blake2b(body, digest_size=16, key=self._secret).digest()

    @property
    def has_own(self) -> bool:
        """Whether there are tokenizers of our own."""
        return self._local.is_there

    def told(self) -> dict[str, object]:
        """How they stand with the engines."""
        doubted = [f"{model}: {path}" for model, path in self.agreement.doubted()]
        return {**self._local.told(), "miscounted": doubted}

    def note(self, asked: Asked, tokens: int, usage: Usage) -> None:
        """What an engine said of a prompt."""
        was_doubted = self.agreement.is_doubted(asked)
        if not self.agreement.note(asked, tokens, usage.prompt_tokens):
            self._count("disagreed")
        if self.agreement.is_doubted(asked) and not was_doubted:
            log.warning(
                "engines of %r count %d tokens where %d were found, again and again: no overlap is "
                "claimed for its prompts at %s",
                asked.model, usage.prompt_tokens, tokens, asked.path,
            )  # fmt: skip

    async def _engine(self, model: str) -> str:
        """An engine of this model: one that the router would send a request to."""
        endpoint = self._engines.get(model)
        if endpoint is None:
            group = self._routing_group
            request = SelectRequest(token_ids=[0], model_name=model, routing_group=group)
            endpoint = (await self._router.select(request)).endpoint
            self._engines[model] = endpoint
        return endpoint

    def _count(self, outcome: str) -> None:
        self._metrics.tokenizations.labels(outcome).inc()
