"""One rank with an engine that this process reads itself: from the journal to the core.

EngineFollower ─lot─▶ journal ─take─▶ messages ─▶ core.apply      no bus, nothing is encoded
       └─ waiting_s, loads ─▶ LoadReport, with the core's own beacon ─▶ core.apply_load
"""

import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from secrets import randbits

from msgspec import Struct
from msgspec.structs import replace

from router.core.commands import ApplyLoad
from router.core.core import RouterCore
from router.protocol.events import LogMessage
from router.protocol.loads import Beacon, LoadReport
from router.protocol.values import Identity, Rank, Scope
from router.protocol.workers import EngineSource
from router.publisher.batch_order.address import EngineAddress
from router.publisher.feed.pacing import Pacing
from router.publisher.follower.follower import (
    EngineFollower,
    FollowedLot,
    FollowerCondition,
    FollowerSettings,
)
from router.publisher.follower.loop_slices import SliceScheduler
from router.publisher.journal.journal import EventJournal, JournalLimits
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.normalizer.settings import EngineSettings

LIMITS = JournalLimits(tail_blocks=1 << 62, recent_events=0, recent_bytes=0)
"""Unlimited: messages go straight into the index, so there is no log to shorten or to replay."""

_CLOCK_S = 0.001
"""Tolerance of rounding: a smaller difference in freshness makes no new report due."""


class Attachment(Struct, frozen=True):
    """The facts by which a rank is followed; if one changes, its follower is replaced."""

    incarnation: int
    scope: Scope
    identity: Identity
    source: EngineSource


class RankSockets(Struct, frozen=True):
    """The state of the event sockets of a rank.

    `was_reached`: they were connected before, here or in a former process. `absent_s`: the time
    without a connection, 0 if there is one. `is_of_another`: what arrives is not the rank's events.
    """

    events: str
    was_reached: bool
    absent_s: float
    problem: str | None
    is_of_another: bool = False


class DirectRank:
    """One rank. `on_message` receives each message of its journal, and the time."""

    __slots__ = (
        "_absent_since_s",
        "_core",
        "_has_begun",
        "_journal",
        "_on_message",
        "_reported_as_of_s",
        "_reported_s",
        "attachment",
        "follower",
        "rank",
    )

    def __init__(
        self,
        rank: Rank,
        attachment: Attachment,
        num_gpu_blocks: int | None,
        core: RouterCore,
        state_path: Path | None,
        pacing: Pacing,
        turns: SliceScheduler,
        on_message: Callable[[LogMessage, float], None],
    ) -> None:
        source = attachment.source
        self.rank = rank
        self.attachment = attachment
        self._core = core
        self._on_message = on_message
        self._absent_since_s: float | None = None
        self._reported_s = self._reported_as_of_s = -inf
        life, multiplier = time.time_ns() // 1000, randbits(64) | 1
        self._journal = EventJournal(
            rank, life, attachment.identity, LIMITS, multiplier, core.naming
        )
        engine = EngineSettings(
            report_mode=source.report_mode,
            num_gpu_blocks=num_gpu_blocks,
            clears_lower_tiers=source.engine == "sglang",
            hybrid=source.hybrid,
            has_full_only=source.has_full_only,
        )
        self.follower = EngineFollower(
            rank,
            self._journal,
            Normalizer(self._journal, attachment.identity, settings=engine),
            FollowerSettings(
                EngineAddress(source.events, source.replay, source.topic), source.load, state_path
            ),
            self._take,
            pacing,
            turns,
        )
        self._has_begun = any(self._journal.state.counts)

    def sockets(self, now_s: float) -> RankSockets:
        """Return the state of the engine's event sockets.

        Must be called often: an absence counts from the first call that finds no connection.
        """
        status = self.follower.status(now_s)
        if status.condition is not FollowerCondition.CONNECTING:
            self._absent_since_s = None
        elif self._absent_since_s is None:
            self._absent_since_s = now_s
        absent_s = 0.0 if self._absent_since_s is None else now_s - self._absent_since_s
        return RankSockets(
            self.attachment.source.events,
            self._has_begun,
            absent_s,
            status.problem,
            self.follower.receives_others,
        )

    @property
    def is_ours(self) -> bool:
        """True if the core still expects messages about this rank from here. O(1)."""
        worker = self._core.fleet.get(self.rank.worker_id)
        if worker is None or worker.announcement.incarnation != self.attachment.incarnation:
            return False
        return worker.announcement.source(self.rank) == self.attachment.source

    def republish(self, now_s: float) -> None:
        """Publish all held blocks again."""
        self._journal.require_checkpoint()
        self._update_core(now_s)

    def is_report_due(self, now_s: float, interval_s: float) -> bool:
        """Return whether the engine has proven, since the last report, that nothing is missing."""
        if not self._has_begun or now_s < self._reported_s + interval_s:
            return False
        return now_s - self.follower.waiting_s(now_s) > self._reported_as_of_s

    def report(self, report_id: int, beacon: Beacon, now_s: float) -> None:
        """Report the freshness and the load of the rank to the core.

        Ids also grow over those of former followers of the rank.
        """
        waiting_s = self.follower.waiting_s(now_s)
        self._reported_s, self._reported_as_of_s = now_s, now_s - waiting_s + _CLOCK_S
        load = self.follower.engine_loads.latest(now_s)
        report = LoadReport(
            worker_id=self.rank.worker_id,
            dp_rank=self.rank.dp_rank,
            agent_incarnation=self.attachment.incarnation,
            incarnation=self._journal.incarnation,
            report_id=report_id,
            event_id=self._journal.last_event_id,
            state=replace(self._journal.taken_state, doubts=self._journal.doubts),
            waiting_s=waiting_s,
            heard={beacon.source_id: beacon.beacon_id},
            counters=load.counters,
            gauges=load.gauges,
            constants=load.constants,
        )
        self._core.handle(ApplyLoad(report), now_s)

    def _take(self, lot: FollowedLot) -> None:
        """Publish a lot, unless the engine was never connected: what it holds is unknown."""
        if not self._has_begun:
            condition = self.follower.status(lot.now_s).condition
            self._has_begun = condition is not FollowerCondition.CONNECTING
        self._update_core(lot.now_s)

    def _update_core(self, now_s: float) -> None:
        if self._has_begun and self.is_ours:
            for message in self._journal.take():
                self._on_message(message, now_s)
