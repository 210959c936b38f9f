"""The tokens of a text, as an engine of the model says them: caches are found by tokens."""

import asyncio
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from router.core import RouterCore
from router.dashboard.errors import NoTokenizerError
from router.errors import KvRouterError
from router.http_client import HttpPool, Origin, PoolLimits, Request, UpstreamError
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import Scope, TokenId

PATIENCE_S = 5.0
ANSWER_LIMIT_BYTES = 16 << 20
AT_ONCE = 4
TRIED_WORKERS = 3

_HEADERS = ((b"content-type", b"application/json"),)


class Tokenized(Struct, frozen=True):
    """Tokens, and the name of the worker whose engine said them."""

    token_ids: list[int]
    by: str


class _Answer(Struct, frozen=True):
    tokens: list[TokenId]


_read = msgspec.json.Decoder(_Answer).decode


class Tokenizing:
    """Asks engines (`/tokenize`, as vLLM's server and the reference engine have it), a few at once;
    more wait. Nothing but the tokens goes back to who asked.
    """

    def __init__(self, core: RouterCore, rng: Random) -> None:
        self._core = core
        self._rng = rng
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def tokens(self, scope: Scope, text: str, *, is_chat: bool) -> Tokenized:
        """The tokens of a text, or of a chat that begins with it. Raises NoTokenizerError."""
        prompt: dict[str, Any] = {"prompt": text}
        if is_chat:
            prompt = {"messages": [{"role": "user", "content": text}]}
        body = msgspec.json.encode({"model": scope.model_name, **prompt})
        problem = "nobody serves it"
        async with self._turns:
            for worker in self._to_ask(scope):
                try:
                    return Tokenized(await _asked(worker.endpoint, body), worker.name)
                except (KvRouterError, msgspec.MsgspecError) as error:
                    problem = f"{worker.name}: {_what(error)}"
        raise NoTokenizerError(scope.model_name, problem)

    def _to_ask(self, scope: Scope) -> list[WorkerAnnouncement]:
        workers = self._core.fleet.schedulable(scope)
        return self._rng.sample(workers, min(len(workers), TRIED_WORKERS))


async def _asked(endpoint: str, body: bytes) -> list[int]:
    origin = Origin.of(endpoint)
    request = Request("POST", "/tokenize", body, _HEADERS, is_repeatable=True)
    pool = HttpPool(PoolLimits(connect_timeout_s=PATIENCE_S))
    try:
        async with pool.asked(origin, request, PATIENCE_S) as answer:
            said = await answer.read(ANSWER_LIMIT_BYTES, PATIENCE_S)
    finally:
        pool.close()
    if answer.status != 200:
        raise UpstreamError(str(origin), "refused", f"/tokenize: {answer.status}")
    return _read(said).tokens


def _what(error: Exception) -> str:
    """Without the engine's address, which not everybody is to know."""
    if isinstance(error, UpstreamError):
        detail = str(error).rpartition("/tokenize: ")[2]
        return f"/tokenize answers {detail}" if detail.isdecimal() else error.problem
    return "its answer is no list of tokens" if isinstance(error, msgspec.MsgspecError) else "?"
