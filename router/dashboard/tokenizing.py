"""Tokenization of texts by an engine of the model, as its cache depends on the tokens."""

import asyncio
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from router.core.core import RouterCore
from router.errors import KvRouterError
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import UNREADABLE, Scope, TokenId
from router.runtime.http_client import HttpPool, Origin, PoolLimits, Request, UpstreamError

PATIENCE_S = 5.0
ANSWER_LIMIT_BYTES = 16 << 20
AT_ONCE = 4
TRIED_WORKERS = 3

_HEADERS = ((b"content-type", b"application/json"),)


class NoTokenizerError(KvRouterError):
    """No engine of the model could tokenize the text."""

    code = "no_tokenizer"
    http_status = 422

    def __init__(self, model_name: str, reason: str) -> None:
        super().__init__(
            f"text: no engine of model {model_name} tokenized it: {reason} (allowed: token_ids)"
        )
        self.model_name = model_name
        self.reason = reason


class Tokenized(Struct, frozen=True):
    """Tokens, and the name of the worker with the engine that produced them."""

    token_ids: list[int]
    by: str


class _Answer(Struct, frozen=True):
    tokens: list[TokenId]


_read = msgspec.json.Decoder(_Answer).decode


class PromptTokenizer:
    """Client of the engines' `/tokenize`, which vLLM's server and the reference engine have.

    At most `AT_ONCE` requests run concurrently; others wait. Only the tokens are returned to the
    caller.
    """

    def __init__(self, core: RouterCore, rng: Random) -> None:
        self._core = core
        self._rng = rng
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def tokens(self, scope: Scope, text: str, *, is_chat: bool) -> Tokenized:
        """Return the tokens of a text, or of a chat that begins with it.

        Raises NoTokenizerError.
        """
        prompt: dict[str, Any] = {"prompt": text}
        if is_chat:
            prompt = {"messages": [{"role": "user", "content": text}]}
        body = msgspec.json.encode({"model": scope.model_name, **prompt})
        problem = "no worker serves it"
        async with self._turns:
            for worker in self._to_ask(scope):
                try:
                    return Tokenized(await _fetched(worker.endpoint, body), worker.name)
                except (KvRouterError, *UNREADABLE) as error:
                    problem = f"{worker.name}: {_what(error)}"
        raise NoTokenizerError(scope.model_name, problem)

    def _to_ask(self, scope: Scope) -> list[WorkerAnnouncement]:
        workers = self._core.fleet.schedulable(scope)
        return self._rng.sample(workers, min(len(workers), TRIED_WORKERS))


async def _fetched(endpoint: str, body: bytes) -> list[int]:
    origin = Origin.of(endpoint)
    request = Request("POST", "/tokenize", body, _HEADERS, is_repeatable=True)
    pool = HttpPool(PoolLimits(connect_timeout_s=PATIENCE_S))
    try:
        async with pool.response(origin, request, PATIENCE_S) as answer:
            content = await answer.read(ANSWER_LIMIT_BYTES, PATIENCE_S)
    finally:
        pool.close()
    if answer.status != 200:
        raise UpstreamError(str(origin), "refused", f"/tokenize: {answer.status}")
    return _read(content).tokens


def _what(error: Exception) -> str:
    """Return the reason, without the engine's address, which is not for all callers."""
    if isinstance(error, UpstreamError):
        detail = str(error).rpartition("/tokenize: ")[2]
        return f"/tokenize responds {detail}" if detail.isdecimal() else error.problem
    return "its response is no list of tokens" if isinstance(error, msgspec.MsgspecError) else "?"
