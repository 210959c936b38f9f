"""Bindings of sessions in Redis, where all routers of a namespace see them.

    kv:{namespace}:session:{model}:{group}:{session}  →  "7.0", for the time to live

Setting and keeping is one step there (a script), so that of two routers one wins. While Redis does
not answer, this router goes by what it knows itself, and asks again after a pause.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from redis.asyncio import BlockingConnectionPool, Redis

from router.errors import ConfigError
from router.masking import masked
from router.metrics import RouterMetrics
from router.protocol.values import Rank
from router.scheduler.affinity import Session
from router.security.redis_access import OPEN_ACCESS, RedisAccess
from router.sessions import LocalSessions

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32

PAUSE_S = 1.0
"""After a failure Redis is left alone for so long: requests do not wait for it one by one."""

_NO_ANSWER = object()

_RANK = re.compile(rb"(0|[1-9][0-9]{0,18})\.(0|[1-9][0-9]{0,4})")

_BIND = """
local function rank(bound)
  local worker, dp_rank = string.match(bound, '^(%d+)%.(%d+)$')
  return worker and #worker <= 19 and #dp_rank <= 5
    and not string.find(worker, '^0%d') and not string.find(dp_rank, '^0%d')
end
local bound = redis.pcall('GET', KEYS[1])
if type(bound) == 'string' and rank(bound) and bound ~= ARGV[2] then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return bound
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return ARGV[1]
"""
"""What is no rank as we write it (`_RANK`) binds nobody, and is written over."""


class RedisSessions:
    """Bindings that routers share; `local` is what this one knows without the others."""

    def __init__(
        self,
        url: str,
        namespace: str,
        ttl_s: float,
        timeout_s: float,
        local: LocalSessions,
        metrics: RouterMetrics,
        access: RedisAccess = OPEN_ACCESS,
    ) -> None:
        """Raises ConfigError for a URL that is none, and for files that cannot be used."""
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=timeout_s,
                **access.options(url),
            )
        except ValueError as error:
            raise ConfigError(
                "redis_url", masked(str(error)), "redis://host:port/database"
            ) from error
        self._redis = Redis(connection_pool=pool)
        self._script = self._redis.register_script(_BIND)
        self._prefix = f"kv:{namespace}:session"
        self._ttl_ms = max(round(ttl_s * 1000), 1)
        self._timeout_s = timeout_s
        self._local = local
        self._metrics = metrics
        self._asks_again_s = 0.0

    async def find(self, session: Session) -> Rank | None:
        """Where a session is bound. What Redis has lost, this router may still know."""
        said = await self._ask("find", self._redis.get, self._key(session))
        return _rank(said) or await self._local.find(session)

    async def bind(self, session: Session, rank: Rank, gone: Rank | None) -> Rank:
        """See `AffinityTable.bind`; known here too, for when Redis is away."""
        values = (str(rank), "" if gone is None else str(gone), self._ttl_ms)
        said = await self._ask("bind", self._script, (self._key(session),), values)
        if said is not _NO_ANSWER:
            rank, gone = _rank(said) or rank, await self._local.find(session)
        return await self._local.bind(session, rank, gone)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def _ask(self, operation: str, command: Callable[..., Any], *arguments: Any) -> Any:
        """What Redis answers, or _NO_ANSWER."""
        if time.monotonic() < self._asks_again_s:
            return _NO_ANSWER
        try:
            async with asyncio.timeout(self._timeout_s):
                return await command(*arguments)
        except Exception as error:  # noqa: BLE001 - what is no Redis makes its library raise anything
            if str(error).startswith("WRONGTYPE"):
                return None  # as any other value that is none of ours
            self._leave_alone(operation, error)
            return _NO_ANSWER

    def _leave_alone(self, operation: str, error: Exception) -> None:
        now_s = time.monotonic()
        is_first = now_s >= self._asks_again_s
        self._asks_again_s = now_s + PAUSE_S
        self._metrics.sessions.store_failures.labels(operation).inc()
        if is_first:  # others that asked beside it have nothing to add
            reason = masked(str(error)) or type(error).__name__
            log.warning("Redis: %s; for %g s sessions are this router's own", reason, PAUSE_S)

    def _key(self, session: Session) -> str:
        parts = (session.scope.model_name, session.scope.routing_group, session.session_id)
        return ":".join([self._prefix, *(quote(part, safe="") for part in parts)])


def _rank(said: object) -> Rank | None:
    """A binding as a rank; None where there is none, or what nobody of ours wrote."""
    found = _RANK.fullmatch(said) if isinstance(said, bytes) else None
    return None if found is None else Rank(int(found[1]), int(found[2]))
