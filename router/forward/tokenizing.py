"""The tokens of what clients write: the engines' own, for prefixes are found by tokens.

An engine is asked (`/tokenize`, as vLLM's server and the reference engine have it), and what it
said is kept: a text that comes again is not tokenised again. Where an engine counts otherwise than
was said here, no overlap is claimed any more.
"""

from collections import OrderedDict
from typing import Any

import msgspec
from msgspec import Struct
from xxhash import xxh3_128_digest

from router.client import RouterClient, SelectRequest, Usage
from router.errors import KvRouterError
from router.forward.bodies import CHAT, Asked
from router.forward.metrics import ForwardMetrics
from router.forward.placing import PromptTokens, guessed
from router.http_client import HttpPool, Origin, Request, UpstreamError
from router.protocol.values import TokenId

PATIENCE_S = 10.0
ANSWER_LIMIT_BYTES = 64 * 1024 * 1024
DISAGREEMENTS = 3
"""In a row, of one model and route; then its prompts are guessed."""

_OF_CHATS = (
    "messages",
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "mm_processor_kwargs",
)
_OF_TEXTS = ("add_special_tokens",)


class _Tokenized(Struct, frozen=True):
    tokens: list[TokenId]


_read = msgspec.json.Decoder(_Tokenized).decode


class KnownTokens:
    """Tokens by what they are of, up to so many in all; the oldest leave."""

    __slots__ = ("_held_tokens", "_known", "_most_tokens")

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._held_tokens = 0
        self._known: OrderedDict[bytes, list[int]] = OrderedDict()

    def get(self, key: bytes) -> list[int] | None:
        """What is known; it is then the newest."""
        tokens = self._known.get(key)
        if tokens is not None:
            self._known.move_to_end(key)
        return tokens

    def put(self, key: bytes, tokens: list[int]) -> None:
        """Keep these."""
        self._held_tokens += len(tokens) - len(self._known.pop(key, ()))
        self._known[key] = tokens
        while self._held_tokens > self._most_tokens:
            self._held_tokens -= len(self._known.popitem(last=False)[1])


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

    def is_doubted(self, asked: Asked) -> bool:
        """Whether what is said of this model's prompts is not to be believed."""
        return self._missed.get((asked.model, asked.path), 0) >= DISAGREEMENTS


class Tokenizing:
    """Finds the tokens of prompts."""

    def __init__(
        self,
        router: RouterClient,
        pool: HttpPool,
        metrics: ForwardMetrics,
        routing_group: str,
        most_tokens: int,
        authorization: bytes | None,
    ) -> None:
        self._router = router
        self._pool = pool
        self._metrics = metrics
        self._routing_group = routing_group
        self._authorization = authorization
        self._known = KnownTokens(most_tokens)
        self._engines: dict[str, str] = {}
        self.agreement = Agreement()

    async def tokens(self, asked: Asked) -> PromptTokens:
        """A prompt's tokens; guessed where no engine says them."""
        if asked.known_tokens is not None:
            return PromptTokens(asked.known_tokens)
        body = _question(asked)
        key = xxh3_128_digest(body)
        tokens = self._known.get(key)
        self._count("asked" if tokens is None else "known")
        if tokens is None:
            try:
                tokens = await self._asked(asked.model, body)
            except (KvRouterError, msgspec.MsgspecError):
                self._engines.pop(asked.model, None)
                self._count("failed")
                return guessed(asked)
            self._known.put(key, tokens)
        is_certain = not self.agreement.is_doubted(asked)
        return PromptTokens(tokens, are_certain=is_certain, are_counted=True)

    def note(self, asked: Asked, tokens: int, usage: Usage) -> None:
        """What an engine said of a prompt."""
        if not self.agreement.note(asked, tokens, usage.prompt_tokens):
            self._count("disagreed")

    async def _asked(self, model: str, body: bytes) -> list[int]:
        origin = Origin.of(await self._engine(model))
        headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
        if self._authorization:
            headers += ((b"authorization", self._authorization),)
        request = Request("POST", "/tokenize", body, headers, is_repeatable=True)
        async with self._pool.asked(origin, request, PATIENCE_S) as answer:
            said = await answer.read(ANSWER_LIMIT_BYTES, PATIENCE_S)
        if answer.status != 200:
            raise UpstreamError(str(origin), "refused", f"/tokenize: {answer.status}")
        return _read(said).tokens

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


def _question(asked: Asked) -> bytes:
    """What `/tokenize` is asked of a prompt; the same for the same prompt."""
    fields: dict[str, Any] = {"model": asked.model}
    names = _OF_CHATS if asked.path == CHAT else _OF_TEXTS
    fields |= {name: asked.fields[name] for name in names if name in asked.fields}
    if asked.path != CHAT:
        fields["prompt"] = asked.prompt
    return msgspec.json.encode(fields)
