"""The engines that this process reads itself, with one follower per rank.

    fleet: registered workers ──settle──▶ attached ranks ─▶ FollowedRank ─▶ core
                                                  │  one task each; restarted if it fails
    data folder ◀──────── a state file each ──────┘

The attached ranks follow from the registered workers: `settle` makes them so, and may be called at
any time. A detached rank has no task, no socket and no file.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from itertools import count, islice

from router.core.commands import Apply, ApplySlice, MarkBeacon
from router.core.core import RouterCore
from router.core.registered_workers import RegisteredWorker
from router.ingest.data_dir import DataDir
from router.ingest.direct_rank import Attachment, DirectRank, RankSockets
from router.observability.metrics import RouterMetrics
from router.protocol.events import LogMessage
from router.protocol.values import Rank
from router.protocol.workers import EngineSource, EngineView
from router.publisher.feed.pacing import Pacing
from router.publisher.follower.follower import FollowerCondition
from router.publisher.follower.follower_metrics import expose_followers
from router.publisher.follower.loop_slices import SliceScheduler
from router.publisher.follower.pull_follower import Follower
from router.publisher.zmq.sockets import Context, open_context
from router.runtime.process.ticks import next_tick

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""The interval of looking for ranks with something to report.

Trust `exact` needs a proof of the last second, for which engines are probed.
"""

REPORT_S, REPORT_S_PER_RANK = 0.2, 0.0004
"""The least time between two reports of a rank; reports of all are at most 2,500 a second."""

REPORTS_AT_ONCE = 64
"""Reports made without a pause."""

RENEW_S = 5.0
"""The pause before a follower that failed is restarted."""


class Engines:
    """The followers of all ranks with an event source of their own."""

    def __init__(
        self,
        core: RouterCore,
        metrics: RouterMetrics,
        data_dir: DataDir | None,
        turns: SliceScheduler,
        *,
        max_ranks: int,
        metrics_max_ranks: int,
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._data_dir = data_dir
        self._ranks: dict[Rank, DirectRank] = {}
        self._tasks: dict[Rank, asyncio.Task[None]] = {}
        self._max_ranks = max_ranks
        self._pacing = Pacing()
        self._turns = turns
        self._group: asyncio.TaskGroup | None = None
        self._context: Context | None = None
        self._settling = asyncio.Lock()
        self._has_slices = asyncio.Event()
        self._report_ids = count(1)
        expose_followers(metrics.registry, lambda: self._shown_followers(metrics_max_ranks))

    async def run(self) -> None:
        """Follow all attached ranks, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for rank in self._ranks:
                    self._start(rank)
                self._group.create_task(self._report_forever())
                self._group.create_task(self._apply_slices_forever())
                await self.settle()
        finally:
            if self._context is not None:
                self._context.term()

    async def settle(self, worker_ids: Iterable[int] | None = None) -> None:
        """Detach ranks that are not registered as they are followed, then attach missing ones.

        `worker_ids`: the workers in question; None: all.
        """
        async with self._settling:
            named = None if worker_ids is None else set(worker_ids)
            for rank in [r for r in self._ranks if named is None or r.worker_id in named]:
                if not self._is_wanted(rank):
                    await self._detach(rank)
            for worker in self._registered(named):
                self._attach_missing(worker)

    def republish(self, rank: Rank) -> bool:
        """Publish all blocks of a rank again. Returns False if it is not followed here."""
        followed = self._ranks.get(rank)
        if followed is None:
            return False
        followed.republish(time.monotonic())
        return True

    def view(self, rank: Rank) -> EngineView | None:
        """Return the state of a rank's follower. Returns None if it is not followed here."""
        followed = self._ranks.get(rank)
        if followed is None:
            return None
        status = followed.follower.status(time.monotonic())
        silent_s = None if status.silent_s is None else round(status.silent_s, 3)
        source = followed.attachment.source
        return EngineView(
            source.events, source.replay, status.condition.value, status.problem, silent_s
        )

    def sockets(self, now_s: float) -> dict[int, dict[Rank, RankSockets]]:
        """Return the state of the event sockets of all ranks, by worker. O(ranks).

        Must be called often: absences count from the first call that finds them.
        """
        found: dict[int, dict[Rank, RankSockets]] = {}
        for rank, each in self._ranks.items():
            found.setdefault(rank.worker_id, {})[rank] = each.sockets(now_s)
        return found

    def is_caught_up(self) -> bool:
        """Return whether no engine is still connecting or replaying."""
        now_s = time.monotonic()
        waited_for = (FollowerCondition.CONNECTING, FollowerCondition.REPLAYING)
        followed = self._ranks.values()
        return all(each.follower.status(now_s).condition not in waited_for for each in followed)

    def _registered(self, named: set[int] | None) -> list[RegisteredWorker]:
        if not self._core.reads_events:
            return []
        ids = [w.announcement.worker_id for w in self._core.fleet] if named is None else named
        workers = [self._core.fleet.get(worker_id) for worker_id in ids]
        announced = [worker.announcement for worker in workers if worker is not None]
        return [each for each in announced if isinstance(each, RegisteredWorker)]

    def _is_wanted(self, rank: Rank) -> bool:
        for worker in self._registered({rank.worker_id}):
            source = worker.source(rank)
            return source is not None and (
                _attachment(worker, source) == self._ranks[rank].attachment
            )
        return False

    def _attach_missing(self, worker: RegisteredWorker) -> None:
        for dp_rank, source in worker.sources.items():
            rank = Rank(worker.worker_id, dp_rank)
            if rank not in self._ranks:
                self._ranks[rank] = self._followed(rank, worker, source)
                self._start(rank)

    def _followed(self, rank: Rank, worker: RegisteredWorker, source: EngineSource) -> DirectRank:
        return DirectRank(
            rank,
            _attachment(worker, source),
            worker.registration.total_kv_blocks or None,
            self._core,
            None if self._data_dir is None else self._data_dir.state_path(rank),
            self._pacing,
            self._turns,
            self._apply,
        )

    def _start(self, rank: Rank) -> None:
        if self._group is not None:
            if self._context is None:
                self._context = open_context(self._max_ranks)
            self._tasks[rank] = self._group.create_task(self._follow(rank, self._context))

    async def _detach(self, rank: Rank) -> None:
        task = self._tasks.pop(rank, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        del self._ranks[rank]
        if self._data_dir is not None:
            self._data_dir.drop_state(rank)

    async def _follow(self, rank: Rank, context: Context) -> None:
        """Run a rank's follower, and restart it when it fails, apart from all others."""
        while True:
            try:
                await self._ranks[rank].follower.run(context)
            except Exception:
                log.exception("rank %s: its follower failed, and is restarted", rank)
                self._metrics.follower_failures.inc()
            await asyncio.sleep(RENEW_S)
            self._renew(rank)

    def _renew(self, rank: Rank) -> None:
        """Replace a rank's follower, without its state, which may have caused the failure."""
        if self._data_dir is not None:
            self._data_dir.drop_state(rank)
        for worker in self._registered({rank.worker_id}):
            source = worker.source(rank)
            if source is not None:
                self._ranks[rank] = self._followed(rank, worker, source)

    def _shown_followers(self, most: int) -> list[Follower]:
        """Return the followers that have metrics of their own."""
        return [each.follower for each in islice(self._ranks.values(), most)]

    def _apply(self, message: LogMessage, now_s: float) -> None:
        verdict = self._core.handle(Apply(message), now_s)[0]
        self._metrics.log_messages.labels("unannounced" if verdict is None else verdict.value).inc()
        self._has_slices.set()

    async def _apply_slices_forever(self) -> None:
        """Apply long messages to the index slice by slice, so that requests run in between."""
        while True:
            await self._has_slices.wait()
            self._has_slices.clear()
            await self._turns.carry_out(iter(self._apply_slice, False))

    def _apply_slice(self) -> bool:
        return self._core.handle(ApplySlice(), 0.0)[0]

    async def _report_forever(self) -> None:
        while True:
            await next_tick(LOOK_S)
            lost = [rank.worker_id for rank, each in self._ranks.items() if not each.is_ours]
            if lost:
                await self.settle(lost)
            await self._report(time.monotonic())

    async def _report(self, now_s: float) -> None:
        """Send one beacon, and a report that carries it for each rank that has one due."""
        interval_s = max(REPORT_S, REPORT_S_PER_RANK * len(self._ranks))
        due = [each for each in self._ranks.values() if each.is_report_due(now_s, interval_s)]
        beacon = self._core.handle(MarkBeacon(), now_s)[0] if due else None
        for i, followed in enumerate(due, 1):
            if beacon is not None and followed.is_ours:
                followed.report(next(self._report_ids), beacon, time.monotonic())
            if i % REPORTS_AT_ONCE == 0:
                await asyncio.sleep(0)


def _attachment(worker: RegisteredWorker, source: EngineSource) -> Attachment:
    return Attachment(worker.incarnation, worker.scope, worker.identity, source)
