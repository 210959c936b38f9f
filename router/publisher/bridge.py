"""One rank of an engine that runs elsewhere: from its sockets to the bus.

follow   ZmqSource ─steps─▶ EngineFeed ─▶ journal        state file, every 2,000 batches
publish  journal ─▶ KvEventPublisher, LoadPublisher ─▶ Transport
run      both, and a stop that loses nothing
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import zmq.asyncio
from msgspec import Struct

from router.errors import FeedStateError, NormalizerStateError
from router.protocol.loads import LoadReport
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.beacons import HeardBeacons
from router.publisher.engine_address import EngineAddress
from router.publisher.engine_feed import EngineFeed
from router.publisher.engine_loads import EngineLoads
from router.publisher.engine_log import EngineLog, EngineLogSettings
from router.publisher.engine_position import SavedPosition
from router.publisher.engine_steps import Step
from router.publisher.events import KvEventPublisher, VerifyOwner
from router.publisher.feed_state import FeedState, load_feed_state, save_feed_state
from router.publisher.journal import EventJournal
from router.publisher.loads import LoadPublisher
from router.publisher.normalizer import Normalizer
from router.publisher.transport import Transport
from router.publisher.zmq_loads import listen_to_loads
from router.publisher.zmq_source import SourceTimes, ZmqSource

log = logging.getLogger(__name__)

STOP_S = 2.0
"""So long a stop waits for the bus to take what is still unsaid."""


class BridgeSettings(Struct, frozen=True):
    """Of one rank. Without a `state_path` nothing is kept; `load_endpoint`: SGLang's."""

    address: EngineAddress
    load_endpoint: str | None = None
    state_path: Path | None = None
    flush_interval_s: float = 0.02
    load_interval_s: float = 0.4
    max_fingerprints: int = 10_000
    times: SourceTimes = SourceTimes()


class EngineBridge:
    """One rank. Its journal and normaliser are new, and nobody else's."""

    def __init__(
        self,
        rank: Rank,
        journal: EventJournal,
        normalizer: Normalizer,
        subjects: Subjects,
        settings: BridgeSettings,
        beacons: HeardBeacons,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._journal = journal
        self._agent_incarnation = journal.incarnation
        self._settings = settings
        self._beacons = beacons
        self._clock = clock
        self._report_count = 0
        self._keeping = asyncio.Lock()
        self._log = EngineLog(
            clock(),
            EngineLogSettings(
                can_replay=settings.address.replay is not None,
                fingerprints=settings.max_fingerprints,
            ),
            self._restored(normalizer),
        )
        self._as_of_s = clock() - self._log.waiting_s(clock())
        self.feed = EngineFeed(journal, normalizer, rank.dp_rank)
        self.engine_loads = EngineLoads(rank.dp_rank, journal.identity.block_size)
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
        self, transport: Transport, verify_owner: VerifyOwner, stop: asyncio.Event
    ) -> None:
        """Follow and publish until `stop` is set; then keep the state, and publish the rest."""
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self.follow())
            publishing = group.create_task(self.publish(transport, verify_owner))
            await stop.wait()
            following.cancel()
            await asyncio.wait([following])
            await self._until_published()
            publishing.cancel()

    async def follow(self) -> None:
        """Follow the engine until cancelled, whatever becomes of the bus."""
        with zmq.asyncio.Context() as context:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._follow_events(context))
                    if self._settings.load_endpoint is not None:
                        group.create_task(
                            listen_to_loads(
                                context,
                                self._settings.load_endpoint,
                                self.engine_loads,
                                self._clock,
                            )
                        )
            finally:
                await self._keep_state()

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
        load = self.engine_loads.latest(now_s)
        return LoadReport(
            worker_id=self._rank.worker_id,
            dp_rank=self._rank.dp_rank,
            agent_incarnation=self._agent_incarnation,
            incarnation=self.events.incarnation,
            report_id=self._report_count,
            event_id=published.event_id,
            state=self.events.reported_state,
            waiting_s=max(self.events.waiting_s, self._log.waiting_s(now_s)),
            heard=self._beacons.last(now_s),
            counters=load.counters,
            gauges=load.gauges,
            constants=load.constants,
        )

    async def _follow_events(self, context: zmq.asyncio.Context) -> None:
        source = ZmqSource(
            context, self._settings.address, self._log, self._settings.times, self._clock
        )
        async with aclosing(source.read()) as lots:
            async for steps in lots:
                self._take(steps)
                if self.feed.is_state_due:
                    await asyncio.shield(self._keep_state())

    def _take(self, steps: Sequence[Step]) -> None:
        now_s = self._clock()
        self.feed.take(steps, now_s)
        self.feed.tick(now_s)
        if self._journal.has_news:
            self.events.noted(self._as_of_s)
        self._as_of_s = now_s - self._log.waiting_s(now_s)
        if steps:
            self.loads.changed()
        self._warn(now_s)

    def _warn(self, now_s: float) -> None:
        for sentence in self.feed.take_complaints(now_s):
            log.warning("rank %s: %s", self._rank, sentence)

    async def _until_published(self) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                while self.events.waiting_s:
                    await asyncio.sleep(self._settings.flush_interval_s)
        except TimeoutError:
            log.warning("rank %s: the bus did not take the last events", self._rank)

    def _restored(self, normalizer: Normalizer) -> SavedPosition | None:
        """Where a former process stopped, if the normaliser could be brought there."""
        try:
            path = self._settings.state_path
            state = None if path is None else load_feed_state(path)
            if state is None:
                return None
            normalizer.load(state.normalizer, self._clock())
        except (FeedStateError, NormalizerStateError) as error:
            log.warning("rank %s: %s; asking the engine for everything", self._rank, error)
            return None
        return state.position

    async def _keep_state(self) -> None:
        """One after the other, also where the one before was cancelled while the disk wrote."""
        path = self._settings.state_path
        async with self._keeping:
            if path is None:
                return
            try:
                state = FeedState(self._log.save(), self.feed.save())
                await asyncio.to_thread(save_feed_state, path, state)
            except FeedStateError as error:
                log.warning("rank %s: state not kept: %s", self._rank, error)
