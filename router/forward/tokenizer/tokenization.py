"""Tokenization of prompts: the tokens must equal the engines', because prefixes match by tokens.

    a local tokenizer, if engines agree ─or─▶ an engine's `/tokenize` ─or─▶ an estimate

Tokens from engines are cached: a repeated text is not tokenized again. If engines repeatedly count
another number of tokens, no overlap is assumed for such prompts any more.
"""

import asyncio
import logging
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from secrets import token_bytes

from router.client import RouterClient, SelectRequest, Usage
from router.errors import KvRouterError
from router.forward.apis.api import CHAT, COMPLETIONS
from router.forward.metrics import ForwardMetrics
from router.forward.placement import PromptTokens, estimated
from router.forward.request_body import CompletionRequest
from router.forward.tokenizer.chats import read_messages
from router.forward.tokenizer.engine_tokens import EngineTokens, question
from router.forward.tokenizer.errors import NotLocalError
from router.forward.tokenizer.local import TokenCache, partition_key
from router.forward.tokenizer.local_tokens import LocalTokens
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

    def __init__(
        self,
        router: RouterClient,
        engines: EngineTokens,
        metrics: ForwardMetrics,
        routing_group: str,
        known: TokenCache,
        local: LocalTokens,
    ) -> None:
        self._router = router
        self._of_engines = engines
        self._metrics = metrics
        self._routing_group = routing_group
        self._local = local
        self._known = known
        self._secret = token_bytes(16)  # keyed, so that callers cannot construct collisions
        self._engines: dict[str, str] = {}
        self.agreement = Agreement()

    async def tokens(self, asked: CompletionRequest, partition: bytes) -> PromptTokens:
        """Return a prompt's tokens, or an estimate. Raises PromptRefusedError.

        `partition`: the part of the caches that is used, of `partition_of`.
        """
        known_tokens = asked.known_tokens
        if known_tokens is not None:
            return PromptTokens(known_tokens)
        if asked.path not in (COMPLETIONS, CHAT):
            return estimated(asked)
        tokens: Sequence[int] | None
        try:
            tokens = await self._local.tokens(asked, partition)
            self._count("local")
        except NotLocalError:
            tokens = await self._tokens_of_engine(asked, partition)
        if tokens is None:
            return estimated(asked)
        is_certain = not self.agreement.is_doubted(asked)
        return PromptTokens(tokens, is_certain, are_counted=not asked.has_several_prompts)

    async def _tokens_of_engine(
        self, asked: CompletionRequest, partition: bytes
    ) -> Sequence[int] | None:
        """Return tokens from the cache or from an engine; None if no engine provides them."""
        if asked.size_bytes > THREAD_BYTES:
            body, key = await asyncio.to_thread(self._question, asked, partition)
        else:
            body, key = self._question(asked, partition)
        known = self._known.get(key)
        self._count("asked" if known is None else "known")
        if known is not None:
            return known
        try:
            engine_tokens = await self._of_engines.tokenize(await self._engine(asked.model), body)
        except KvRouterError:
            self._engines.pop(asked.model, None)
            self._count("failed")
            return None
        tokens = array("I", engine_tokens)
        self._known.put(key, tokens)
        return tokens

    def _question(self, asked: CompletionRequest, partition: bytes) -> tuple[bytes, bytes]:
        """Return the `/tokenize` body and its cache key. Raises PromptRefusedError."""
        if asked.path == CHAT:  # fails here for messages that no engine accepts
            read_messages(bytes(asked.fields["messages"]))
        body = question(asked)
        secret = partition_key(self._secret, partition)
        return body, blake2b(body, digest_size=16, key=secret).digest()

    @property
    def has_own(self) -> bool:
        """True if there are local tokenizers."""
        return self._local.is_there

    def described(self) -> dict[str, object]:
        """Return the agreement between tokenizers and engines, for `/ready`."""
        doubted = [f"{model}: {path}" for model, path in self.agreement.doubted()]
        return {**self._local.described(), "miscounted": doubted}

    def note(self, asked: CompletionRequest, tokens: int, usage: Usage) -> None:
        """Compare an engine's reported usage with the number of tokens."""
        was_doubted = self.agreement.is_doubted(asked)
        if not self.agreement.note(asked, tokens, usage.prompt_tokens):
            self._count("disagreed")
        if self.agreement.is_doubted(asked) and not was_doubted:
            log.warning(
                "engines of %r count %d prompt tokens, this process %d, repeatedly: no overlap is "
                "assumed for its prompts at %s; check the tokenizer of this model",
                asked.model, usage.prompt_tokens, tokens, asked.path,
            )  # fmt: skip

    async def _engine(self, model: str) -> str:
        """Return the endpoint of an engine of this model, from a selection of the router."""
        endpoint = self._engines.get(model)
        if endpoint is None:
            group = self._routing_group
            request = SelectRequest(token_ids=[0], model_name=model, routing_group=group)
            endpoint = (await self._router.select(request)).endpoint
            self._engines[model] = endpoint
        return endpoint

    def _count(self, outcome: str) -> None:
        self._metrics.tokenizations.labels(outcome).inc()
