"""The presence of a worker on the bus, whichever engine it serves.

connect ▶ check, refuse a twin, claim ▶ renew, publish, respond ▶ withdraw, flush
                                        repeated when the connection is closed
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from msgspec.structs import replace

from router.protocol.catalogue import WorkerAnnouncement, encode_entry, worker_key
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.event_publisher import KvEventPublisher
from router.publisher.load_publisher import LoadPublisher, ReceivedBeacons
from router.publisher.rank_queries import RankQueryResponder
from router.runtime.bus.connection import Bus, StreamLimits, live_on_bus, until_closed
from router.runtime.bus.errors import BusError, LogConflictError, TwinError
from router.runtime.bus.kv_lease import KvLease
from router.runtime.bus.transport import NatsTransport
from router.runtime.security.nats_access import NatsAccess
from worker_agent.config.base import AgentBusConfig
from worker_agent.process.control import (
    answer_checkpoint_requests,
    answer_pings,
    follow_fleet_size,
    listen_for_beacons,
    listen_for_pings,
    refuse_twin,
)

log = logging.getLogger(__name__)

Answering: TypeAlias = Callable[[Bus, Subjects], Coroutine[Any, Any, None]]

LAST_WORDS_S = 2.0
"""The timeout, after the withdrawal, to publish the remaining changes."""


class RankOnBus(Protocol):
    """The parts of a rank that use the bus."""

    @property
    def rank(self) -> Rank:
        """The rank."""

    @property
    def events(self) -> KvEventPublisher:
        """The publisher of its blocks."""

    @property
    def loads(self) -> LoadPublisher:
        """The publisher of its load."""

    @property
    def answers(self) -> RankQueryResponder:
        """The responder to queries on it."""


class WorkerPresence:
    """One worker, announced while `run` runs.

    With its own engine, its key expires with the agent. The key of an agent next to an engine
    stays, since the engine may outlive the agent.
    """

    def __init__(
        self,
        config: AgentBusConfig,
        access: NatsAccess,
        subjects: Subjects,
        announcement: WorkerAnnouncement,
        ranks: Sequence[RankOnBus],
        beacons: ReceivedBeacons,
        answering: Sequence[Answering] = (),
    ) -> None:
        """Prepare the presence; `answering` lists further tasks to run while connected."""
        self._config = config
        self._answering = answering
        self._subjects = subjects
        self._announcement = announcement
        self._ranks = ranks
        self._beacons = beacons
        self._access = access
        self._announcer: KvLease | None = None
        self.is_announced = False

    async def run(self) -> None:
        """Stay on the bus until cancelled; then withdraw, and publish the remaining changes.

        Raises TwinError in a group.
        """
        config = self._config
        name = f"worker {self._announcement.name}"
        await live_on_bus(config.nats_url, name, self._connected, self._live, self._access)

    def change_blocksets(self, blocksets: dict[int, dict[str, Any]]) -> None:
        """Announce other blocksets, at once if the worker is announced."""
        self._announcement = replace(self._announcement, blocksets=blocksets)
        if self._announcer is not None and self.is_announced:
            self._announcer.change(encode_entry(self._announcement))

    async def _live(self, bus: Bus) -> None:
        config = self._config
        announcer = KvLease(
            bus.js,
            self._subjects,
            worker_key(self._announcement.worker_id),
            self._announcement.incarnation,
            expires=self._announcement.agent_is_engine,
            num_replicas=config.num_replicas,
        )
        self._announcer = announcer
        limits = StreamLimits(config.event_stream_max_bytes, config.num_replicas)
        transport = NatsTransport(bus, self._subjects, limits)
        publishers = {each.rank: each.events for each in self._ranks}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(until_closed(bus))
                await self._claim(bus, announcer, group)
                group.create_task(announcer.run())
                group.create_task(answer_checkpoint_requests(bus, self._subjects, publishers))
                group.create_task(listen_for_beacons(bus, self._subjects, self._beacons))
                if not config.event_flush_s:
                    group.create_task(follow_fleet_size(bus, self._subjects, publishers.values()))
                for answer in self._answering:
                    group.create_task(answer(bus, self._subjects))
                for each in self._ranks:
                    group.create_task(each.events.run(transport, announcer.verify))
                    group.create_task(each.loads.run(transport))
                    group.create_task(each.answers.run(bus, self._subjects))
        finally:
            self.is_announced = False
            await announcer.withdraw()
            if not bus.closed.is_set():
                await self._publish_rest(transport, announcer)

    async def _claim(self, bus: Bus, announcer: KvLease, group: asyncio.TaskGroup) -> None:
        """Claim the worker id; of two concurrent claims one finds a ping or a taken key."""
        worker_id = self._announcement.worker_id
        await announcer.look()
        await refuse_twin(bus, self._subjects, worker_id)
        pings = await listen_for_pings(bus, self._subjects, worker_id)
        group.create_task(answer_pings(pings, self._announcement.incarnation))
        try:
            claimed = self._announcement
            await announcer.claim(encode_entry(claimed))
        except LogConflictError as error:
            detail = "another agent claimed it at the same moment"
            raise TwinError(worker_key(worker_id), detail) from error
        self.is_announced = True
        if self._announcement is not claimed:
            announcer.change(encode_entry(self._announcement))

    async def _publish_rest(self, transport: NatsTransport, announcer: KvLease) -> None:
        """Publish a checkpoint, as messages in transit at the withdrawal may be lost."""
        with suppress(TimeoutError, BusError, TwinError):
            async with asyncio.timeout(LAST_WORDS_S):
                for each in self._ranks:
                    if each.events.waiting_s:
                        each.events.require_checkpoint()
                        await each.events.flush(transport, announcer.verify)

    def _connected(self, connected: bool) -> None:
        """Renew the announcement soon: the bus may have lost its store."""
        if connected and self._announcer is not None:
            self._announcer.renew_soon()
