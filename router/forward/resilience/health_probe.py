"""Active health checks of workers.

Probes let an ejected worker that responds be tried again, and eject a silent worker before requests
fail there.
"""

import asyncio
import time
from collections.abc import Iterator
from random import Random

from router.errors import InvalidFieldError
from router.forward.metrics import ForwardMetrics
from router.forward.resilience.circuit_breaker import CircuitBreaker
from router.forward.resilience.worker_list import ListedWorker, WorkerList
from router.runtime.http_client import HttpPool, Origin, Request, UpstreamError

EVERY_S = 0.5
PATIENCE_S = 2.0
LONG_PATIENCE_S = 5.0
"""Timeout of a probe of a serving worker, which may be busy, in seconds."""

MOST_AT_ONCE = 32
BODY_LIMIT_BYTES = 65_536
_HEALTH = Request("GET", "/health", is_repeatable=True)


class ProbeTimes:
    """The schedule of probes. Pure.

    The interval of each worker is randomised, so that workers are never probed all at once, in
    particular by several forwarders.
    """

    __slots__ = ("_due_s", "_interval_s", "_random")

    def __init__(self, interval_s: float, random: Random) -> None:
        self._interval_s = interval_s
        self._random = random
        self._due_s: dict[ListedWorker, float] = {}

    def due(self, workers: set[ListedWorker], now_s: float) -> list[ListedWorker]:
        """Return the due workers, and schedule their next probes. A new worker waits, too."""
        soon, late = 0.5 * self._interval_s, 1.5 * self._interval_s
        self._due_s = {
            each: self._due_s.get(each, now_s + self._random.uniform(0, self._interval_s))
            for each in workers
        }
        due = [each for each, due_s in self._due_s.items() if due_s <= now_s]
        self._due_s |= {each: now_s + self._random.uniform(soon, late) for each in due}
        return due


class HealthProber:
    """Probes ejected workers when they may be tried again, others every `interval_s` (0: never)."""

    def __init__(
        self,
        roster: WorkerList,
        breaker: CircuitBreaker,
        pool: HttpPool,
        metrics: ForwardMetrics,
        interval_s: float,
    ) -> None:
        self._roster = roster
        self._breaker = breaker
        self._pool = pool
        self._metrics = metrics
        self._times = ProbeTimes(interval_s, Random()) if interval_s else None
        self._in_flight: set[int] = set()

    async def run(self) -> None:
        """Probe workers, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(EVERY_S)
                now_s = time.monotonic()
                for worker_id, endpoint in (*self._failed(now_s), *self._serving(now_s)):
                    if worker_id not in self._in_flight and len(self._in_flight) < MOST_AT_ONCE:
                        self._in_flight.add(worker_id)
                        group.create_task(self._probe(worker_id, endpoint))
                self._breaker.forget(now_s)

    def _failed(self, now_s: float) -> list[tuple[int, str]]:
        return list(self._breaker.to_probe(now_s))

    def _serving(self, now_s: float) -> Iterator[tuple[int, str]]:
        if self._times is not None:
            for worker in self._times.due(set(self._roster.workers.values()), now_s):
                if self._breaker.state(worker.worker_id) != "open":
                    yield worker.worker_id, worker.endpoint

    async def _probe(self, worker_id: int, endpoint: str) -> None:
        state = self._breaker.state(worker_id)
        is_open = state == "open"
        status = await self._status(endpoint, PATIENCE_S if is_open else LONG_PATIENCE_S)
        self._in_flight.discard(worker_id)
        # An engine without this route is alive, too.
        lives = status == 200 if is_open else 0 < status < 500
        self._metrics.probes.labels(state, "answered" if lives else "silent").inc()
        now_s = time.monotonic()
        if is_open:
            self._breaker.probed(worker_id, now_s, lives=lives)
        else:
            self._breaker.checked(worker_id, endpoint, now_s, lives=lives)

    async def _status(self, endpoint: str, patience_s: float) -> int:
        """Return the status of a probe's response; 0 without a response."""
        try:
            async with self._pool.response(Origin.of(endpoint), _HEALTH, patience_s) as answer:
                await answer.read(BODY_LIMIT_BYTES, patience_s)
                return answer.status
        except (UpstreamError, InvalidFieldError):
            return 0
