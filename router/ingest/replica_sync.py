"""Replica sync: publication of our reservations on the bus, and receipt of other routers'.

    5 ms apart     Ledger ─▶ kv.{ns}.sequences.{us} ─▶ the others
    the others ─▶ kv.{ns}.sequences.* ─▶ RouterCore.apply_peer
    one of them ─▶ kv.{ns}.sequences.{us}.inbox ─▶ snapshots that we requested, and progress of our
                                                   requests that its callers reported to it; or it
                                                   requests a snapshot of ours

The bus is NATS, or streams between the routers (`peer_bus.py`).

Frames are produced with or without the bus, so nothing ever waits for it. Frames that it does not
accept are lost; the others notice the gap by the number of the next frame, and request a snapshot.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Protocol, TypeAlias

from router.core.commands import ApplyPeer
from router.core.core import RouterCore
from router.core.effects import TellReplica
from router.errors import WireError
from router.ingest.effect_runner import EffectRunner
from router.observability.health import ServiceStatus
from router.observability.replica_metrics import ReplicaMetrics
from router.protocol.replicas import (
    Frame,
    HandedOver,
    PeerMessage,
    ProgressTold,
    ReplicaMessage,
    SharedReservation,
    SnapshotPart,
    SnapshotWanted,
    decode_replica_message,
    encode_replica_message,
)
from router.protocol.subjects import Subjects
from router.runtime.bus.connection import Bus, subscribe
from router.runtime.bus.errors import BusError, BusUnavailableError
from router.sequence.replicas.handover import Handover
from router.sequence.replicas.replica_set import MAX_REPLICAS
from router.sequence.replicas.reservation_log import HEARTBEAT_S, ReservationLog

log = logging.getLogger(__name__)

FRAME_S = 0.005
"""Minimum interval of frames, in seconds."""

GREETING_S = 0.1
"""Time for the other routers to respond to a new one, in seconds."""

PATIENCE_S = 3.0
"""Time limit of a new router for receiving all reservations before it is ready, in seconds."""

LOT = 100
"""Reservations handed over to another router at once."""

GIVE_S = 0.5
"""Time for another router to take over a lot, in seconds."""

_WARN_INTERVAL_S = 5.0

Take: TypeAlias = Callable[[str, bytes], None]
"""Takes a message: its subject on the bus, and its bytes."""


class ReplicaBus(Protocol):
    """A carrier of messages between routers. Sending raises BusError; the message may be lost."""

    async def publish(self, payload: bytes) -> None:
        """Send a frame to all other routers."""

    async def send(self, router_id: int, payload: bytes) -> None:
        """Send a message to one router."""

    async def receive(self, take: Take) -> None:
        """Take the messages of other routers until cancelled. Raises what `take` raises."""

    async def until_greeted(self) -> None:
        """Wait until the other routers had time to respond to this one."""


class NatsReplicas:
    """The other routers on a connection to NATS."""

    def __init__(self, bus: Bus, subjects: Subjects, router_id: int) -> None:
        self._bus = bus
        self._subjects = subjects
        self._router_id = router_id

    async def publish(self, payload: bytes) -> None:
        """Send a frame to all other routers."""
        await self._bus.send(self._subjects.reservations(self._router_id), payload)

    async def send(self, router_id: int, payload: bytes) -> None:
        """Send a message to one router."""
        await self._bus.send(self._subjects.to_replica(router_id), payload)

    async def receive(self, take: Take) -> None:
        """Take the messages of other routers until cancelled. Raises what `take` raises."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(self._subjects.to_replica(self._router_id), take))
            group.create_task(self._receive(self._subjects.all_reservations, take))

    async def until_greeted(self) -> None:
        """Wait until the other routers had time to respond to this one."""
        await asyncio.sleep(GREETING_S)

    async def _receive(self, subject: str, take: Take) -> None:
        """Take the messages of a subject as they are read."""
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take_message(subject: bytes, _reply: bytes, _head: bytes, payload: bytes) -> None:
            try:
                take(subject.decode(errors="replace"), payload)
            except Exception as error:  # noqa: BLE001 - raised below
                if not failure.done():
                    failure.set_exception(error)

        with self._bus.client.taking(take_message):
            await subscribe(self._bus, subject)
            await failure


class ReplicaSync:
    """This router among its replicas. `publish_forever` always runs, `run` while there is a bus."""

    def __init__(
        self,
        core: RouterCore,
        router_id: int,
        incarnation: int,
        effect_runner: EffectRunner,
        status: ServiceStatus,
        metrics: ReplicaMetrics,
        subjects: Subjects,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._has_news = asyncio.Event()
        self._ledger = ReservationLog(router_id, incarnation, self._has_news.set)
        self._effect_runner = effect_runner
        self._status = status
        self._metrics = metrics
        self._subjects = subjects
        self._clock = clock
        self._bus: ReplicaBus | None = None
        self._handover = Handover()
        self._askers: OrderedDict[int, None] = OrderedDict()
        self._is_asked = asyncio.Event()
        self._warned_s = float("-inf")
        core.tracker.ledger = self._ledger
        status.replicas_caught_up = False

    async def run(self, bus: ReplicaBus) -> None:
        """Follow the other routers until cancelled."""
        self._bus = bus
        async with asyncio.TaskGroup() as group:
            group.create_task(bus.receive(self.take))
            group.create_task(self._answer(bus))
            group.create_task(self._catch_up(bus))

    async def publish_forever(self) -> None:
        """Publish changes to the other routers, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._has_news.wait()
            self._has_news.clear()
            while (frame := self._next_frame()) is not None:
                await self._send(frame)
                if not self._ledger.is_behind:
                    break
            await asyncio.sleep(FRAME_S)

    async def hand_over(self) -> None:
        """Hand over the reservations to other routers, before this router stops.

        They are sent in lots; the next router is tried if one does not take a lot. Without another
        router they are lost.
        """
        recipients = sorted(mirror.router_id for mirror in self._core.foreign.replicas)
        ours = len(self._core.tracker)
        for heir in recipients:
            while lot := tuple(islice(self._core.tracker.all_shared(), LOT)):
                if not await self._gives(heir, lot):
                    break
        if ours:
            log.info("handed over %d of %d reservations", ours - len(self._core.tracker), ours)

    def take(self, subject: str, payload: bytes) -> None:
        """Apply a message of another router, or drop and count it."""
        if subject == self._subjects.reservations(self._ledger.router_id):
            return
        try:
            message = decode_replica_message(payload)
            self._check_sender(subject, message)
        except WireError as error:
            self._metrics.messages.labels("unreadable").inc()
            self._warn("dropped an unreadable message of a router on %s: %s", subject, error)
            return
        self._metrics.messages.labels(type(message).__name__).inc()
        if isinstance(message, SnapshotWanted):
            self._note_asker(message.asked_by)
            return
        self._record_transfer(message)
        met = self._core.foreign.replicas.counts.met
        ours = [each for each in self._handover.request_ids if each in self._core.tracker]
        self._effect_runner.perform(self._core.handle(ApplyPeer(message), self._clock())[1])
        if isinstance(message, Frame | SnapshotPart):
            self._handover.yielded(each for each in ours if each not in self._core.tracker)
        if self._core.foreign.replicas.counts.met > met:
            log.info("first frame of another router received on %s", subject)
            self._ledger.request_frame()

    async def _catch_up(self, bus: ReplicaBus) -> None:
        """Request frames from the other routers, and wait for the reservations that are missing."""
        self._ledger.request_frame()
        patience_s = self._clock() + PATIENCE_S
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await bus.until_greeted()
        while self._core.foreign.replicas.in_doubt and self._clock() < patience_s:
            await asyncio.sleep(GREETING_S / 5)
        self._status.replicas_caught_up = True

    async def _answer(self, bus: ReplicaBus) -> None:
        while True:
            await self._is_asked.wait()
            self._is_asked.clear()
            while self._askers:
                asked_by, _ = self._askers.popitem(last=False)
                await self._send_snapshot(bus, asked_by)

    async def _send_snapshot(self, bus: ReplicaBus, asked_by: int) -> None:
        try:
            for part in self._ledger.snapshot():
                await bus.send(asked_by, encode_replica_message(part))
                await asyncio.sleep(0)
        except BusError as error:
            log.debug("snapshot for router %d: %s; it will be requested again", asked_by, error)
        else:
            self._metrics.snapshots_sent.inc()

    async def _gives(self, heir: int, lot: tuple[SharedReservation, ...]) -> bool:
        """Return whether another router takes over any of these reservations."""
        before, given = len(self._core.tracker), HandedOver(self._ledger.router_id, lot)
        request_ids = given.request_ids
        with suppress(BusError, TimeoutError):
            async with asyncio.timeout(GIVE_S):
                await self._connected_bus().send(heir, encode_replica_message(given))
                self._handover.give(heir, request_ids)
                owners = self._core.foreign.replicas.owners
                while not self._handover.is_settled(request_ids, owners):
                    await asyncio.sleep(FRAME_S)
        return len(self._core.tracker) < before

    def _record_transfer(self, message: PeerMessage) -> None:
        """Forward progress of reservations that were handed over to their present routers."""
        if isinstance(message, HandedOver):
            self._handover.take_back(message.request_ids)
        elif isinstance(message, ProgressTold):
            is_booked = message.request_id in self._core.tracker
            recipients = self._handover.recipients(message, is_booked=is_booked)
            self._effect_runner.perform(TellReplica(heir, message) for heir in recipients)

    def _connected_bus(self) -> ReplicaBus:
        if self._bus is None:
            raise BusUnavailableError("not connected yet")
        return self._bus

    def _next_frame(self) -> Frame | None:
        return self._ledger.take_frame(self._core.tracker.shared, self._clock())

    async def _send(self, frame: Frame) -> None:
        payload = encode_replica_message(frame)
        try:
            await self._connected_bus().publish(payload)
        except BusError:
            self._metrics.frames_lost.inc(bool(frame.change_count))
        else:
            self._metrics.frames_sent.inc()
            self._metrics.bytes_sent.inc(len(payload))

    def _note_asker(self, router_id: int) -> None:
        if len(self._askers) < MAX_REPLICAS:
            self._askers[router_id] = None
            self._is_asked.set()

    def _check_sender(self, subject: str, message: ReplicaMessage) -> None:
        expected = (
            self._subjects.reservations(message.router_id)
            if isinstance(message, Frame)
            else self._subjects.to_replica(self._ledger.router_id)
        )
        if subject != expected:
            raise WireError(f"a {type(message).__name__} belongs on {expected}")

    def _warn(self, text: str, *values: object) -> None:
        now_s = self._clock()
        if now_s - self._warned_s >= _WARN_INTERVAL_S:
            self._warned_s = now_s
            log.warning(text, *values)
