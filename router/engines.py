"""The engines that this process hears itself, one follower a rank.

    fleet: registered workers ──settle──▶ attached ranks ─▶ FollowedRank ─▶ core
                                                  │  one task each; one that fails begins anew
    data folder ◀──────── a state file each ──────┘

What is attached follows from who is registered: `settle` makes it so, and may be called at any
time. Detached means: no task, no socket, no file is left.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from itertools import count, islice
from math import inf

from router.core import RouterCore
from router.data_dir import DataDir
from router.followed_rank import Attachment, FollowedRank
from router.metrics import RouterMetrics
from router.process.moments import next_moment
from router.protocol.events import LogMessage
from router.protocol.values import Rank
from router.protocol.workers import EngineSource
from router.publisher.follower import FollowerCondition
from router.publisher.follower_metrics import FollowerCollector
from router.publisher.pacing import Pacing
from router.publisher.pull_follower import Follower
from router.publisher.turns import Turns
from router.publisher.zmq_context import open_context
from router.publisher.zmq_sockets import Context
from router.registrations import RegisteredWorker
from router.worker_views import EngineView

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often it is looked for ranks with something to report; `exact` needs a proof of the last
second, and engines are probed for one.
"""

REPORT_S, REPORT_S_PER_RANK = 0.2, 0.0004
"""How far apart a rank's reports are at least, so that all of them are 2,500 a second at most."""

REPORTS_AT_ONCE = 64
"""Reports made without a pause."""

GONE_LOOK_S = 1.0
GONE_S = 5.0
"""A worker none of whose engines could be reached for so long is not chosen until one can be."""

RENEW_S = 5.0
"""How long a follower that failed is left alone before it begins anew."""


class Engines:
    """Followers of all ranks with a source of their own."""

    def __init__(
        self,
        core: RouterCore,
        metrics: RouterMetrics,
        data_dir: DataDir | None,
        turns: Turns,
        *,
        max_ranks: int,
        metrics_max_ranks: int,
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._data_dir = data_dir
        self._ranks: dict[Rank, FollowedRank] = {}
        self._tasks: dict[Rank, asyncio.Task[None]] = {}
        self._max_ranks = max_ranks
        self._pacing = Pacing()
        self._turns = turns
        self._group: asyncio.TaskGroup | None = None
        self._context: Context | None = None
        self._settling = asyncio.Lock()
        self._has_slices = asyncio.Event()
        self._report_ids = count(1)
        metrics.registry.register(
            FollowerCollector(lambda: self._shown_followers(metrics_max_ranks))
        )

    async def run(self) -> None:
        """Follow whoever is attached, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for rank in self._ranks:
                    self._start(rank)
                self._group.create_task(self._report_forever())
                self._group.create_task(self._apply_slices_forever())
                self._group.create_task(self._look_for_gone_forever())
                await self.settle()
        finally:
            if self._context is not None:
                self._context.term()

    async def settle(self, worker_ids: Iterable[int] | None = None) -> None:
        """Let go of ranks that are no longer registered as they are followed, then attach those
        that are; of these workers, or of all.
        """
        async with self._settling:
            named = None if worker_ids is None else set(worker_ids)
            for rank in [r for r in self._ranks if named is None or r.worker_id in named]:
                if not self._is_wanted(rank):
                    await self._detach(rank)
            for worker in self._registered(named):
                self._attach_missing(worker)

    def retell(self, rank: Rank) -> bool:
        """Have a rank tell everything once more; False if it is not followed here."""
        followed = self._ranks.get(rank)
        if followed is None:
            return False
        followed.retell(time.monotonic())
        return True

    def view(self, rank: Rank) -> EngineView | None:
        """How well a rank is followed; None if it is not, here."""
        followed = self._ranks.get(rank)
        if followed is None:
            return None
        status = followed.follower.status(time.monotonic())
        silent_s = None if status.silent_s is None else round(status.silent_s, 3)
        source = followed.attachment.source
        return EngineView(
            source.events, source.replay, status.condition.value, status.problem, silent_s
        )

    def is_caught_up(self) -> bool:
        """Is every engine followed, or past help?"""
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

    def _followed(self, rank: Rank, worker: RegisteredWorker, source: EngineSource) -> FollowedRank:
        return FollowedRank(
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
        """Whatever goes wrong with one engine is no other's business."""
        while True:
            try:
                await self._ranks[rank].follower.run(context)
            except Exception:
                log.exception("rank %s: its follower failed, and begins anew", rank)
                self._metrics.events.follower_failures.inc()
            await asyncio.sleep(RENEW_S)
            self._renew(rank)

    def _renew(self, rank: Rank) -> None:
        """Without what it knew, which may be what it failed at."""
        if self._data_dir is not None:
            self._data_dir.drop_state(rank)
        for worker in self._registered({rank.worker_id}):
            source = worker.source(rank)
            if source is not None:
                self._ranks[rank] = self._followed(rank, worker, source)

    def _shown_followers(self, most: int) -> list[Follower]:
        """Those with metrics of their own."""
        return [each.follower for each in islice(self._ranks.values(), most)]

    def _apply(self, message: LogMessage, now_s: float) -> None:
        verdict = self._core.apply(message, now_s)
        self._metrics.events.log_messages.labels(
            "unannounced" if verdict is None else verdict.value
        ).inc()
        self._has_slices.set()

    async def _apply_slices_forever(self) -> None:
        """Long messages go into the index slice by slice, so that requests come in between."""
        while True:
            await self._has_slices.wait()
            self._has_slices.clear()
            await self._turns.carry_out(iter(self._core.apply_slice, False))

    async def _look_for_gone_forever(self) -> None:
        while True:
            await next_moment(GONE_LOOK_S)
            now_s = time.monotonic()
            absent_s: dict[int, float] = {}
            for rank, each in self._ranks.items():
                known_s = absent_s.get(rank.worker_id, inf)
                absent_s[rank.worker_id] = min(known_s, each.absent_s(now_s))
            for worker_id, since_s in absent_s.items():
                self._note_gone(worker_id, is_gone=since_s >= GONE_S)

    def _note_gone(self, worker_id: int, *, is_gone: bool) -> None:
        worker = self._core.fleet.get(worker_id)
        if worker is None or is_gone == (worker.problem is not None):
            return
        if is_gone:
            log.warning("worker %d: its engines are gone; it gets no requests", worker_id)
            self._core.set_problem(worker_id, f"its engines could not be reached for {GONE_S:g} s")
        else:
            log.info("worker %d: its engines are back", worker_id)
            self._core.set_problem(worker_id, None)

    async def _report_forever(self) -> None:
        while True:
            await next_moment(LOOK_S)
            lost = [rank.worker_id for rank, each in self._ranks.items() if not each.is_ours]
            if lost:
                await self.settle(lost)
            await self._report(time.monotonic())

    async def _report(self, now_s: float) -> None:
        """One beacon, and a report that carries it of each rank that has anything to report."""
        interval_s = max(REPORT_S, REPORT_S_PER_RANK * len(self._ranks))
        due = [each for each in self._ranks.values() if each.is_report_due(now_s, interval_s)]
        beacon = self._core.beacon(now_s).beacon if due else None
        for i, followed in enumerate(due, 1):
            if beacon is not None and followed.is_ours:
                followed.report(next(self._report_ids), beacon, time.monotonic())
            if i % REPORTS_AT_ONCE == 0:
                await asyncio.sleep(0)


def _attachment(worker: RegisteredWorker, source: EngineSource) -> Attachment:
    return Attachment(worker.incarnation, worker.scope, worker.identity, source)
