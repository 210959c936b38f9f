"""A worker's life on the bus, whatever engine it serves.

connect ▶ look, refuse a twin, claim ▶ renew, events, loads, answers, control ▶ withdraw, the rest
                                                       again when the connection is closed
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from router.bus_errors import BusError, LogConflictError, TwinError
from router.protocol.catalogue import WorkerAnnouncement, encode_entry, worker_key
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.announcer import Announcer
from router.publisher.answers import RankAnswers
from router.publisher.beacons import HeardBeacons
from router.publisher.bus import Bus, StreamLimits, live_on_bus, until_closed
from router.publisher.events import KvEventPublisher
from router.publisher.loads import LoadPublisher
from router.publisher.transport import NatsTransport
from router.security.nats_access import nats_access
from worker_agent.common_config import AgentConfig
from worker_agent.control import (
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
"""So long the bus has, after the withdrawal, to take what is still unsaid."""


class RankOnBus(Protocol):
    """What the bus hears of one rank."""

    @property
    def rank(self) -> Rank:
        """Which one."""

    @property
    def events(self) -> KvEventPublisher:
        """What it holds."""

    @property
    def loads(self) -> LoadPublisher:
        """How busy it is."""

    @property
    def answers(self) -> RankAnswers:
        """What it tells whoever asks."""


class Presence:
    """One worker, announced while `run` runs. Its own engine's key expires with the agent; one
    beside an engine stays, since the engine may outlive the agent.
    """

    def __init__(
        self,
        config: AgentConfig,
        announcement: WorkerAnnouncement,
        ranks: Sequence[RankOnBus],
        beacons: HeardBeacons,
        answering: Sequence[Answering] = (),
    ) -> None:
        """`answering`: who else answers there, as long as there is a bus."""
        self._config = config
        self._answering = answering
        self._subjects = Subjects(config.namespace)
        self._announcement = announcement
        self._ranks = ranks
        self._beacons = beacons
        self._access = nats_access(config)
        self._announcer: Announcer | None = None
        self.is_announced = False

    async def run(self) -> None:
        """Live on the bus until cancelled; then withdraw, and say the rest. Raises TwinError in a
        group.
        """
        config = self._config
        name = f"worker {config.name}"
        await live_on_bus(config.nats_url, name, self._connected, self._live, self._access)

    async def _live(self, bus: Bus) -> None:
        config = self._config
        announcer = Announcer(
            bus.js,
            self._subjects,
            worker_key(config.id),
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
                await self._say_the_rest(transport, announcer)

    async def _claim(self, bus: Bus, announcer: Announcer, group: asyncio.TaskGroup) -> None:
        """Of two that start at the same moment, one hears the other or finds the key taken."""
        worker_id = self._config.id
        await announcer.look()
        await refuse_twin(bus, self._subjects, worker_id)
        pings = await listen_for_pings(bus, self._subjects, worker_id)
        group.create_task(answer_pings(pings, self._announcement.incarnation))
        try:
            await announcer.claim(encode_entry(self._announcement))
        except LogConflictError as error:
            detail = "another agent claimed it at the same moment"
            raise TwinError(worker_key(worker_id), detail) from error
        self.is_announced = True

    async def _say_the_rest(self, transport: NatsTransport, announcer: Announcer) -> None:
        """What was on its way may or may not have arrived: a checkpoint says it again."""
        with suppress(TimeoutError, BusError, TwinError):
            async with asyncio.timeout(LAST_WORDS_S):
                for each in self._ranks:
                    if each.events.waiting_s:
                        each.events.require_checkpoint()
                        await each.events.flush(transport, announcer.verify)

    def _connected(self, connected: bool) -> None:
        """The bus may have come back without its store."""
        if connected and self._announcer is not None:
            self._announcer.renew_soon()
