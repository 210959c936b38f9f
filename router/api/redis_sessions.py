"""Session bindings in Redis, shared by all routers of a namespace.

    kv:{namespace}:session:{model}:{group}:{session}  →  "7.0", for the time to live

Setting and keeping is one atomic step there (a script), so that one of two routers wins. While
Redis does not respond, this router uses its own bindings, and tries Redis again after a pause.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from redis.asyncio import BlockingConnectionPool, Redis

from router.api.sessions import LocalSessions
from router.errors import ConfigError
from router.observability.metrics import RouterMetrics
from router.protocol.values import Rank
from router.runtime.process.redaction import redact
from router.runtime.security.redis_access import OPEN_ACCESS, RedisAccess
from router.scheduler.affinity import Session

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32

PAUSE_S = 1.0
"""Pause after a failure, in seconds: requests do not wait for Redis one by one."""

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
"""A script that binds a session; a value that is not a rank in our notation is overwritten."""


class RedisSessions:
    """Bindings that routers share; `local` has the bindings known to this router."""

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
        """Set up the client; raises ConfigError for an invalid URL, and for unusable files."""
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=timeout_s,
                **access.options(url),
            )
        except ValueError as error:
            raise ConfigError(
                "redis_url", redact(str(error)), "redis://host:port/database"
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
        """Return the rank a session is bound to, from Redis or else from the local bindings."""
        value = await self._call("find", self._redis.get, self._key(session))
        return _rank(value) or self._local.find(session)

    async def bind(self, session: Session, rank: Rank, gone: Rank | None) -> Rank:
        """Bind a session here and in Redis. See `AffinityTable.bind`."""
        values = (str(rank), "" if gone is None else str(gone), self._ttl_ms)
        value = await self._call("bind", self._script, (self._key(session),), values)
        if value is not _NO_ANSWER:
            rank, gone = _rank(value) or rank, self._local.find(session)
        return self._local.bind(session, rank, gone)

    async def release(self, session: Session) -> None:
        """Forget the rank of a session, here and in Redis."""
        await self._call("release", self._redis.delete, self._key(session))
        self._local.release(session)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def _call(self, operation: str, command: Callable[..., Any], *arguments: Any) -> Any:
        """Return the response of Redis, or _NO_ANSWER if it fails."""
        if time.monotonic() < self._asks_again_s:
            return _NO_ANSWER
        try:
            async with asyncio.timeout(self._timeout_s):
                return await command(*arguments)
        except Exception as error:  # noqa: BLE001 - its library may raise anything
            if str(error).startswith("WRONGTYPE"):
                return None  # like any other foreign value
            self._leave_alone(operation, error)
            return _NO_ANSWER

    def _leave_alone(self, operation: str, error: Exception) -> None:
        now_s = time.monotonic()
        is_first = now_s >= self._asks_again_s
        self._asks_again_s = now_s + PAUSE_S
        self._metrics.session_store_failures.labels(operation).inc()
        if is_first:  # concurrent failures add no information
            reason = redact(str(error)) or type(error).__name__
            log.warning(
                "Redis unavailable: %s; using local session bindings for %g s", reason, PAUSE_S
            )

    def _key(self, session: Session) -> str:
        parts = (session.scope.model_name, session.scope.routing_group, session.session_id)
        return ":".join([self._prefix, *(quote(part, safe="") for part in parts)])


def _rank(value: object) -> Rank | None:
    """Return a binding as a rank, or None if there is none in our notation."""
    found = _RANK.fullmatch(value) if isinstance(value, bytes) else None
    return None if found is None else Rank(int(found[1]), int(found[2]))
