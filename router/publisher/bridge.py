"""One rank of an engine that runs elsewhere: from its sockets to the bus.

follow   EngineFollower ─▶ journal
publish                    journal ─▶ KvEventPublisher, LoadPublisher ─▶ Transport
run      both, and a stop that loses nothing
"""

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec import Struct

from router.protocol.loads import LoadReport
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.beacons import HeardBeacons
from router.publisher.events import KvEventPublisher, VerifyOwner
from router.publisher.follower import EngineFollower, FollowedLot, FollowerSettings, OnLot
from router.publisher.journal import EventJournal
from router.publisher.loads import LoadPublisher
from router.publisher.normalizer import Normalizer
from router.publisher.pacing import Pacing
from router.publisher.pull_follower import Follower, PullFollower, PullSettings
from router.publisher.source_journal import SourceJournal
from router.publisher.transport import Transport
from router.publisher.turns import Turns
from router.publisher.zmq_sockets import Context

log = logging.getLogger(__name__)

STOP_S = 2.0
"""So long a stop waits for the bus to take what is still unsaid."""


class BridgeSettings(Struct, frozen=True):
    """Of one rank."""

    follower: FollowerSettings | PullSettings
    flush_interval_s: float = 0.02
    load_interval_s: float = 0.4


class EngineBridge:
    """One rank. Its journal and normaliser are new, and nobody else's.

    The normaliser tells the journal, or one of its sources (`consolidated.py`).
    """

    def __init__(
        self,
        rank: Rank,
        journal: EventJournal,
        normalizer: Normalizer,
        subjects: Subjects,
        settings: BridgeSettings,
        beacons: HeardBeacons,
        pacing: Pacing,
        turns: Turns,
        clock: Callable[[], float] = time.monotonic,
        also_waiting_s: Callable[[float], float] = lambda _: 0.0,
    ) -> None:
        """`also_waiting_s`: for how long, at a moment, anything may have been missing that other
        sources of the journal tell.
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
        """Follow and publish until `stop` is set; then keep the state, and publish the rest."""
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self.follower.run(context))
            publishing = group.create_task(self.publish(transport, verify_owner))
            await stop.wait()
            following.cancel()
            await asyncio.wait([following])
            await self._until_published()
            publishing.cancel()

    async def publish(self, transport: Transport, verify_owner: VerifyOwner) -> None:
        """Publish events and loads until cancelled, or until `verify_owner` raises TwinError (in a
        group).
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.events.run(transport, verify_owner))
            group.create_task(self.loads.run(transport))

    def report(self) -> LoadReport:
        """The next load report: what the log has, and for how long anything is known to be missing,
        on either side of us.
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
            log.warning("rank %s: the bus did not take the last events", self._rank)


def _follower(
    rank: Rank,
    journal: SourceJournal,
    normalizer: Normalizer,
    settings: FollowerSettings | PullSettings,
    on_lot: OnLot,
    pacing: Pacing,
    turns: Turns,
    clock: Callable[[], float],
) -> Follower:
    if isinstance(settings, PullSettings):
        return PullFollower(rank, journal, normalizer, settings, on_lot, clock)
    return EngineFollower(rank, journal, normalizer, settings, on_lot, pacing, turns, clock)
