"""Polls of the metrics of engines without an agent, which teach how fast these engines are.

    registered workers ─▶ watches ─ GET /metrics, once a second ─▶ PolledEngine ─▶ core
                             ▲                                          │
    other routers ◀─ bus ─── │ ◀── a router of a lower id polls it ─────┴─▶ other routers

An engine is polled by every router without a bus, and with one by the router of the lowest id that
can read its metrics: the others stop while its loads arrive. Ranks with a load socket are not
polled.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from math import inf
from random import Random
from typing import Any, TypeAlias

import httpx

from router.core.commands import ApplyPolled
from router.core.core import RouterCore
from router.core.registered_workers import RegisteredWorker
from router.errors import WireError
from router.observability.metrics import RouterMetrics
from router.protocol.loads import PolledLoad
from router.protocol.values import Rank
from router.publisher.engine_metrics.dialects import EngineLimits
from router.publisher.engine_metrics.loads import EngineLoad
from router.publisher.engine_metrics.polled_engine import PolledEngine
from router.publisher.follower.http_fetch import fetch
from router.runtime.process.metrics import Rows, expose, gauge
from router.runtime.process.ticks import next_tick

log = logging.getLogger(__name__)

Share: TypeAlias = Callable[[PolledLoad], None]
Access: TypeAlias = Callable[[int], Mapping[str, Any]]
"""The options of httpx, such as credentials, by worker id."""

LOOK_S = 0.1
"""The interval of looking for polls that are due."""

POLL_S, POLL_S_PER_ENGINE = 1.0, 0.01
"""The least interval of an engine's polls; those of all engines are at most 100 a second."""

JITTER = 0.1
TIMEOUT_S = 2.0
LIMIT_BYTES = 4 << 20
AT_ONCE = 32
MOST_PAUSE_S = 30.0
"""Limit of the pause, which doubles with each failure."""

TAKEN_OVER_S = 3.0
"""The time for which the loads of another router replace polls of our own."""


class PollDuties:
    """Which engines another router polls. `source_id`: this router; None: it polls none itself."""

    __slots__ = ("_read_s", "_taken_over_s", "source_id")

    def __init__(self, source_id: int | None) -> None:
        self.source_id = source_id
        self._taken_over_s: dict[int, float] = {}
        self._read_s: dict[int, float] = {}

    def note_read(self, worker_id: int, now_s: float) -> None:
        """Note that this router has read the metrics of an engine."""
        self._read_s[worker_id] = now_s

    def take(self, load: PolledLoad, now_s: float) -> bool:
        """Return whether a received load counts: not if this router reads that engine instead."""
        ours = self.source_id
        if ours is not None and load.source_id >= ours:
            is_ours = now_s <= self._read_s.get(load.worker_id, -inf) + TAKEN_OVER_S
            if load.source_id == ours or is_ours:
                return False
        self._taken_over_s[load.worker_id] = now_s
        return True

    def is_ours(self, worker_id: int, now_s: float) -> bool:
        """Return whether this router has to poll an engine."""
        return now_s > self._taken_over_s.get(worker_id, -inf) + TAKEN_OVER_S

    def keep(self, worker_ids: set[int]) -> None:
        """Forget all other engines."""
        for known in (self._taken_over_s, self._read_s):
            for worker_id in known.keys() - worker_ids:
                del known[worker_id]


class _Watch:
    """A polled worker. `problem`: why its last poll failed; None: it did not, or there was none."""

    __slots__ = ("client", "due_s", "engine", "is_running", "pause_s", "problem", "worker")

    def __init__(self, worker: RegisteredWorker, due_s: float) -> None:
        registered = worker.registration
        self.worker = worker
        self.due_s = due_s
        self.engine = PolledEngine(
            registered.engine or "vllm",
            EngineLimits(
                block_size=registered.block_size,
                total_kv_blocks=registered.total_kv_blocks,
                max_num_batched_tokens=registered.max_num_batched_tokens,
            ),
        )
        self.client: httpx.AsyncClient | None = None
        self.is_running = False
        self.pause_s = POLL_S
        self.problem: str | None = None

    async def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await client.aclose()


class EnginePolls:
    """The polls of this process. `share`: publishes a load to other routers."""

    def __init__(
        self,
        core: RouterCore,
        metrics: RouterMetrics,
        duties: PollDuties,
        access: Access,
        share: Share,
        random: Random,
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._duties = duties
        self._access = access
        self._share = share
        self._random = random
        self._watches: dict[int, _Watch] = {}
        self._seen_version = -1
        self._running = 0
        self._lives = time.time_ns() // 1000
        self._group: asyncio.TaskGroup | None = None
        expose(metrics.registry, "kv_router_polled_", _METRICS, self)

    @property
    def counts(self) -> dict[str, int]:
        """The engines, by the router that reads their metrics; failed: none can."""
        now_s, found = time.monotonic(), {"read": 0, "shared": 0, "failed": 0}
        for worker_id, watch in self._watches.items():
            is_ours = self._duties.is_ours(worker_id, now_s)
            found["shared" if not is_ours else "failed" if watch.problem else "read"] += 1
        return found

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                while True:
                    await next_tick(LOOK_S)
                    await self._settle()
                    self._start_due(time.monotonic())
        finally:
            for watch in self._watches.values():
                await watch.close()

    async def _settle(self) -> None:
        """Watch the registered workers as they are now."""
        if self._core.fleet.version == self._seen_version:
            return
        self._seen_version = self._core.fleet.version
        workers = {each.worker_id: each for each in map(_polled, self._core.fleet) if each}
        for worker_id in list(self._watches):
            watch = self._watches[worker_id]
            if workers.get(worker_id) != watch.worker:
                del self._watches[worker_id]
                await watch.close()
        now_s = time.monotonic()
        for worker_id, worker in workers.items():
            if worker_id not in self._watches:
                due_s = now_s + POLL_S * self._random.random()
                self._watches[worker_id] = _Watch(worker, due_s)
        self._duties.keep(set(self._watches))

    def _start_due(self, now_s: float) -> None:
        assert self._group is not None
        interval_s = max(POLL_S, POLL_S_PER_ENGINE * len(self._watches))
        for worker_id, watch in self._watches.items():
            if watch.is_running or now_s < watch.due_s or self._running >= AT_ONCE:
                continue
            jitter = 1 + JITTER * (2 * self._random.random() - 1)
            watch.due_s = now_s + max(interval_s, watch.pause_s) * jitter
            if self._duties.is_ours(worker_id, now_s):
                watch.is_running = True
                self._running += 1
                self._group.create_task(self._poll(watch))

    async def _poll(self, watch: _Watch) -> None:
        began_s = time.monotonic()
        try:
            body = await self._fetch(watch)
            ended_s = time.monotonic()
            took_s = ended_s - began_s
            loads = watch.engine.take(body, began_s + took_s / 2, took_s)
        except WireError as error:
            await self._failed(watch, error.reason)
        else:
            self._metrics.engine_poll_seconds.observe(took_s)
            self._read(watch, loads, ended_s)
        finally:
            watch.is_running = False
            self._running -= 1

    async def _fetch(self, watch: _Watch) -> bytes:
        """Return the body. Redirects are not followed, and its size is limited."""
        worker = watch.worker
        if watch.client is None:
            options = self._access(worker.worker_id)
            limits = httpx.Limits(max_connections=1)
            watch.client = httpx.AsyncClient(
                timeout=TIMEOUT_S, limits=limits, trust_env=False, **options
            )
        url = worker.endpoint.rstrip("/").removesuffix("/v1") + watch.engine.path
        return await fetch(watch.client, "GET", url, limit_bytes=LIMIT_BYTES, timeout_s=TIMEOUT_S)

    async def _failed(self, watch: _Watch, problem: str) -> None:
        """Try again later, over another connection: an abandoned one may never be free again."""
        self._metrics.engine_polls.labels("failed").inc()
        if problem != watch.problem:
            log.info("worker %d: its metrics cannot be read: %s", watch.worker.worker_id, problem)
        if problem.startswith("status 4"):
            watch.engine.refused()
        watch.problem = problem
        watch.pause_s = min(2 * watch.pause_s, MOST_PAUSE_S)
        await watch.close()

    def _read(self, watch: _Watch, loads: Mapping[int, EngineLoad], now_s: float) -> None:
        worker, watch.problem, watch.pause_s = watch.worker, None, POLL_S
        self._metrics.engine_polls.labels("read").inc()
        self._duties.note_read(worker.worker_id, now_s)
        for dp_rank in worker.dp_ranks:
            load, source = loads.get(dp_rank), worker.source(Rank(worker.worker_id, dp_rank))
            if load is None or (source is not None and source.load is not None):
                continue
            polled = PolledLoad(
                worker_id=worker.worker_id,
                dp_rank=dp_rank,
                source_id=self._duties.source_id or 0,
                life_id=self._lives + watch.engine.life(dp_rank),
                counters=load.counters,
                gauges=load.gauges,
                constants=load.constants,
                timed=load.timed or (),
            )
            if self._core.handle(ApplyPolled(polled), now_s)[0]:
                self._share(polled)


def _polled(worker: Any) -> RegisteredWorker | None:
    """Return a worker that is to be polled: without an agent, and not read by its load sockets."""
    announced = worker.announcement
    if not isinstance(announced, RegisteredWorker) or not announced.endpoint:
        return None
    sources = [announced.source(rank) for rank in announced.ranks]
    has_all_loads = all(source is not None and source.load is not None for source in sources)
    return None if has_all_loads else announced


_METRICS: Rows = {
    "engines": gauge(
        "Engines without an agent, by the state of their metrics: read here, shared by another "
        "router, failed",
        "counts",
        "state",
    )
}
