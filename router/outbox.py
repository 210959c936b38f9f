"""Carries out what the core asks of the world.

Effects are logged and counted at once; those that need the bus wait in a bounded queue. When it is
full the newest is dropped and counted: checkpoints and announcements are asked for again by the
next tick or report, so are other routers' snapshots, and reservations nobody speaks of expire.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from router.bus_errors import BusError, BusUnavailableError
from router.effect_notes import EffectNotes
from router.effects import (
    AdmitWaiting,
    Effect,
    FetchWorker,
    RefuseWaiting,
    RequestCheckpoint,
    SendBeacon,
    TellReplica,
)
from router.errors import KvRouterError
from router.metrics import RouterMetrics
from router.protocol.loads import encode_beacon
from router.protocol.replicas import encode_replica_message
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.publisher.bus import Bus, translated
from router.timeline import Timeline

log = logging.getLogger(__name__)

CAPACITY = 10_000

_FOR_THE_BUS = (RequestCheckpoint, FetchWorker, TellReplica, SendBeacon)


class Outbox:
    """Effects on their way out. `perform` never waits; `run` needs a bus.

    `retell` has an engine that this process hears itself tell everything again; False if it is
    none of those. Without a bus, what would need one is nobody's concern.
    """

    def __init__(
        self,
        subjects: Subjects,
        metrics: RouterMetrics,
        *,
        has_bus: bool = True,
        retell: Callable[[Rank], bool] = lambda _: False,
        timeline: Timeline | None = None,
    ) -> None:
        self._subjects = subjects
        self._metrics = metrics
        self._has_bus = has_bus
        self._notes = EffectNotes(metrics, Timeline(time.time) if timeline is None else timeline)
        self._retellers = [retell]
        self._admit: Callable[[], None] = _nobody_waits
        self._refuse: Callable[[int, KvRouterError], None] = _nobody_waits
        self._queue: asyncio.Queue[Effect] = asyncio.Queue(CAPACITY)

    def perform(self, effects: Iterable[Effect]) -> None:
        """Log and count effects, and queue what needs the bus."""
        for effect in effects:
            if isinstance(effect, RequestCheckpoint) and self._retell(effect.rank):
                self._notes.note_retold(effect)
                continue
            self._notes.note(effect)
            if isinstance(effect, AdmitWaiting):
                self._admit()
            elif isinstance(effect, RefuseWaiting):
                self._refuse(effect.ticket, effect.error)
            elif self._has_bus and isinstance(effect, _FOR_THE_BUS):
                self._enqueue(effect)

    def add_waiters(
        self, admit: Callable[[], None], refuse: Callable[[int, KvRouterError], None]
    ) -> None:
        """Have somebody else look after requests that wait."""
        self._admit, self._refuse = admit, refuse

    def add_reteller(self, retell: Callable[[Rank], bool]) -> None:
        """Have somebody else's ranks tell everything again, too."""
        self._retellers.append(retell)

    async def run(self, bus: Bus, fetch_worker: Callable[[int], Awaitable[None]]) -> None:
        """Carry out queued effects until cancelled."""
        while True:
            effect = await self._queue.get()
            try:
                await self._carry_out(effect, bus, fetch_worker)
            except BusError as error:
                log.debug("%s failed: %s", effect, error)
                self._metrics.bus.outbox_failures.labels(type(effect).__name__).inc()

    async def _carry_out(
        self, effect: Effect, bus: Bus, fetch_worker: Callable[[int], Awaitable[None]]
    ) -> None:
        match effect:
            case RequestCheckpoint(rank, _):
                await self._tell(bus, self._subjects.checkpoint_wanted(rank), b"")
            case TellReplica(router_id, message):
                subject = self._subjects.to_replica(router_id)
                await self._tell(bus, subject, encode_replica_message(message))
            case SendBeacon(beacon):
                await self._tell(bus, self._subjects.beacons, encode_beacon(beacon))
            case FetchWorker(worker_id):
                await fetch_worker(worker_id)

    async def _tell(self, bus: Bus, subject: str, payload: bytes) -> None:
        if not bus.client.is_connected:
            raise BusUnavailableError("not connected")
        async with translated(subject):
            await bus.client.publish(subject, payload)

    def _retell(self, rank: Rank) -> bool:
        return any(retell(rank) for retell in self._retellers)

    def _enqueue(self, effect: Effect) -> None:
        try:
            self._queue.put_nowait(effect)
        except asyncio.QueueFull:
            self._metrics.bus.outbox_overflows.inc()


def _nobody_waits(*_: object) -> None:
    """In a process without callers."""
