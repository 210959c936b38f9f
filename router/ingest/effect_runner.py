"""Execution of the core's effects.

Effects are logged and counted at once; those that need the bus wait in a bounded queue. When it is
full, the newest effect is dropped and counted: checkpoints and announcements are requested again by
the next tick or report, snapshots of other routers too, and reservations without updates expire.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from router.core.effects import (
    AdmitWaiting,
    Effect,
    FetchWorker,
    RefuseWaiting,
    RequestCheckpoint,
    SendBeacon,
    ShareLoad,
    TellReplica,
)
from router.errors import KvRouterError
from router.observability.effect_log import EffectLog
from router.observability.event_timeline import EventTimeline
from router.observability.metrics import RouterMetrics
from router.protocol.loads import encode_beacon, encode_load_report
from router.protocol.replicas import encode_replica_message
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.runtime.bus.connection import Bus
from router.runtime.bus.errors import BusError

log = logging.getLogger(__name__)

CAPACITY = 10_000

_FOR_THE_BUS = (RequestCheckpoint, FetchWorker, TellReplica, SendBeacon, ShareLoad)


class EffectRunner:
    """The queue of outgoing effects. `perform` never waits; `run` needs a bus.

    `republish` makes an engine that is attached directly to this process report all its blocks
    again, and returns False for any other rank. Without a bus, effects that need one are dropped,
    but for messages to other routers if `add_replicas` was called.
    """

    def __init__(
        self,
        subjects: Subjects,
        metrics: RouterMetrics,
        *,
        has_bus: bool = True,
        republish: Callable[[Rank], bool] = lambda _: False,
        timeline: EventTimeline | None = None,
    ) -> None:
        self._subjects = subjects
        self._metrics = metrics
        self._has_bus = has_bus
        self._notes = EffectLog(metrics, EventTimeline(time.time) if timeline is None else timeline)
        self._retellers = [republish]
        self._to_replica: Callable[[int, bytes], None] | None = None
        self._admit: Callable[[], None] = _cancel_wait
        self._refuse: Callable[[int, KvRouterError], None] = _cancel_wait
        self._queue: asyncio.Queue[Effect] = asyncio.Queue(CAPACITY)

    def perform(self, effects: Iterable[Effect]) -> None:
        """Log and count effects, and queue those that need the bus."""
        for effect in effects:
            if isinstance(effect, RequestCheckpoint) and self._retell(effect.rank):
                self._notes.note_retold(effect)
                continue
            self._notes.note(effect)
            if isinstance(effect, AdmitWaiting):
                self._admit()
            elif isinstance(effect, RefuseWaiting):
                self._refuse(effect.ticket, effect.error)
            elif isinstance(effect, TellReplica) and self._to_replica is not None:
                self._offer(effect, self._to_replica)
            elif self._has_bus and isinstance(effect, _FOR_THE_BUS):
                self._enqueue(effect)

    def add_waiters(
        self, admit: Callable[[], None], refuse: Callable[[int, KvRouterError], None]
    ) -> None:
        """Set the callbacks that admit and refuse waiting requests."""
        self._admit, self._refuse = admit, refuse

    def add_replicas(self, send: Callable[[int, bytes], None]) -> None:
        """Send messages to other routers by this callback, which raises BusError, without a bus."""
        self._to_replica = send

    def add_reteller(self, republish: Callable[[Rank], bool]) -> None:
        """Add a callback that makes its ranks report all their blocks again."""
        self._retellers.append(republish)

    async def run(self, bus: Bus, fetch_worker: Callable[[int], Awaitable[None]]) -> None:
        """Execute queued effects until cancelled."""
        while True:
            effect = await self._queue.get()
            try:
                await self._carry_out(effect, bus, fetch_worker)
            except BusError as error:
                self._note_failure(effect, error)

    async def _carry_out(
        self, effect: Effect, bus: Bus, fetch_worker: Callable[[int], Awaitable[None]]
    ) -> None:
        match effect:
            case RequestCheckpoint(rank, _):
                await bus.send(self._subjects.checkpoint_wanted(rank), b"")
            case TellReplica(router_id, message):
                subject = self._subjects.to_replica(router_id)
                await bus.send(subject, encode_replica_message(message))
            case ShareLoad(load):
                await bus.send(self._subjects.load(load.rank), encode_load_report(load))
            case SendBeacon(beacon):
                await bus.send(self._subjects.beacons, encode_beacon(beacon))
            case FetchWorker(worker_id):
                await fetch_worker(worker_id)

    def _offer(self, effect: TellReplica, send: Callable[[int, bytes], None]) -> None:
        try:
            send(effect.router_id, encode_replica_message(effect.message))
        except BusError as error:
            self._note_failure(effect, error)

    def _note_failure(self, effect: Effect, error: BusError) -> None:
        log.debug("%s failed: %s", effect, error)
        self._metrics.outbox_failures.labels(type(effect).__name__).inc()

    def _retell(self, rank: Rank) -> bool:
        return any(republish(rank) for republish in self._retellers)

    def _enqueue(self, effect: Effect) -> None:
        try:
            self._queue.put_nowait(effect)
        except asyncio.QueueFull:
            self._metrics.outbox_overflows.inc()


def _cancel_wait(*_: object) -> None:
    """Do nothing: this process has no callers."""
