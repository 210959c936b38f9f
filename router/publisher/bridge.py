"""One rank of an engine that runs elsewhere: its events and loads, from its sockets to the bus.

follow   EngineFollower ─▶ journal
publish                    journal ─▶ KvEventPublisher, LoadPublisher ─▶ Transport
run      both, and a stop that publishes what is left
"""

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec import Struct

from router.protocol.loads import LoadReport
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.event_publisher import KvEventPublisher, VerifyOwner
from router.publisher.feed.pacing import Pacing
from router.publisher.follower.follower import EngineFollower, FollowedLot, FollowerSettings, OnLot
from router.publisher.follower.loop_slices import SliceScheduler
from router.publisher.follower.pull_follower import Follower, PullFollower, PullSettings
from router.publisher.journal.consolidator import SourceJournal
from router.publisher.journal.journal import EventJournal
from router.publisher.load_publisher import LoadPublisher, ReceivedBeacons
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.zmq.sockets import Context
from router.runtime.bus.transport import Transport

log = logging.getLogger(__name__)

STOP_S = 2.0
"""The timeout of a stop for publishing the remaining events."""


class BridgeSettings(Struct, frozen=True):
    """The settings of one rank."""

    follower: FollowerSettings | PullSettings
    flush_interval_s: float = 0.02
    load_interval_s: float = 0.4


class EngineBridge:
    """A bridge of one rank. Its journal and normaliser must be new and unshared.

    The normaliser writes to the journal, or to one of its sources (`consolidator.py`).
    """

    def __init__(
        self,
        rank: Rank,
        journal: EventJournal,
        normalizer: Normalizer,
        subjects: Subjects,
        settings: BridgeSettings,
        beacons: ReceivedBeacons,
        pacing: Pacing,
        turns: SliceScheduler,
        clock: Callable[[], float] = time.monotonic,
        also_waiting_s: Callable[[float], float] = lambda _: 0.0,
    ) -> None:
        """Create the bridge of a rank.

        `also_waiting_s`: returns for a time how long news of the journal's other sources may have
        been missing.
        """
        self._rank = rank
        self._journal = journal
        self._agent_incarnation = journal.incarnation
        self._settings = settings
        self._beacons = beacons
        self._clock = clock
        self._report_count = 0
        self.follower = _follower(
            rank,
            normalizer.journal,
            normalizer,
            settings.follower,
            self._followed,
            pacing,
            turns,
            clock,
        )
        self._also_waiting_s = also_waiting_s
        self.events = KvEventPublisher(
            journal,
            subjects.events(rank),
            flush_interval_s=settings.flush_interval_s,
            clock=clock,
        )
        self.loads = LoadPublisher(
            self.report, subjects.load(rank), interval_s=settings.load_interval_s
        )

    async def run(
        self,
        context: Context,
        transport: Transport,
        verify_owner: VerifyOwner,
        stop: asyncio.Event,
    ) -> None:
        """Follow and publish until `stop` is set; then save the state, and publish the rest."""
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self.follower.run(context))
            publishing = group.create_task(self.publish(transport, verify_owner))
            await stop.wait()
            following.cancel()
            await asyncio.wait([following])
            await self._until_published()
            publishing.cancel()

    async def publish(self, transport: Transport, verify_owner: VerifyOwner) -> None:
        """Publish events and loads until cancelled.

        Raises TwinError, in an exception group, if `verify_owner` raises it.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.events.run(transport, verify_owner))
            group.create_task(self.loads.run(transport))

    def report(self) -> LoadReport:
        """Return the next load report.

        It contains the position of the log, and for how long events may have been missing between
        the engine and this agent, or between this agent and the bus.
        """
        now_s = self._clock()
        self._report_count += 1
        published = self.events.published
        load = self.follower.engine_loads.latest(now_s)
        followed_s = max(self.follower.waiting_s(now_s), self._also_waiting_s(now_s))
        return LoadReport(
            worker_id=self._rank.worker_id,
            dp_rank=self._rank.dp_rank,
            agent_incarnation=self._agent_incarnation,
            incarnation=self.events.incarnation,
            report_id=self._report_count,
            event_id=published.event_id,
            state=self.events.reported_state,
            waiting_s=max(self.events.waiting_s, followed_s),
            heard=self._beacons.last(now_s),
            counters=load.counters,
            gauges=load.gauges,
            constants=load.constants,
            timed=load.timed,
        )

    def _followed(self, lot: FollowedLot) -> None:
        if self._journal.has_news:
            self.events.noted(lot.since_s)
        if lot.steps:
            self.loads.changed()

    async def _until_published(self) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                while self.events.waiting_s:
                    await asyncio.sleep(self._settings.flush_interval_s)
        except TimeoutError:
            log.warning("rank %s stopped: its last events were not published", self._rank)


def _follower(
    rank: Rank,
    journal: SourceJournal,
    normalizer: Normalizer,
    settings: FollowerSettings | PullSettings,
    on_lot: OnLot,
    pacing: Pacing,
    turns: SliceScheduler,
    clock: Callable[[], float],
) -> Follower:
    if isinstance(settings, PullSettings):
        return PullFollower(rank, journal, normalizer, settings, on_lot, clock)
    return EngineFollower(rank, journal, normalizer, settings, on_lot, pacing, turns, clock)
