"""The other routers, on the bus: what we booked goes out, and what they booked comes in.

    5 ms apart     Ledger ─▶ kv.{ns}.sequences.{us} ─▶ the others
    the others ─▶ kv.{ns}.sequences.* ─▶ RouterCore.apply_peer
    one of them ─▶ kv.{ns}.sequences.{us}.inbox ─▶ snapshots we asked for, and what callers told it
                                                   of our requests; or it wants a snapshot of ours

Frames are made whether or not the bus is there, so nothing ever waits for it: those that it does
not take are lost, which the others notice by the next one's number, and ask.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from router.bequest import Bequest
from router.bus_errors import BusError, BusUnavailableError
from router.core import RouterCore
from router.effects import TellReplica
from router.errors import WireError
from router.outbox import Outbox
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
from router.publisher.bus import Bus, subscribe, translated
from router.replica_metrics import ReplicaMetrics
from router.sequence.ledger import HEARTBEAT_S, Ledger
from router.sequence.replicas import MAX_REPLICAS
from router.status import ServiceStatus

log = logging.getLogger(__name__)

FRAME_S = 0.005
"""Time between two frames, at least."""

GREETING_S = 0.1
"""Time for the others to answer a newcomer."""

PATIENCE_S = 3.0
"""How long a newcomer waits for all they have booked, until it is ready."""

LOT = 100
"""Reservations given to another router at once."""

GIVE_S = 0.5
"""How long another router has to take a lot."""

_WARN_INTERVAL_S = 5.0


class Replica:
    """This router among its replicas. `tell_forever` always runs, `run` while there is a bus."""

    def __init__(
        self,
        core: RouterCore,
        router_id: int,
        incarnation: int,
        outbox: Outbox,
        status: ServiceStatus,
        metrics: ReplicaMetrics,
        subjects: Subjects,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._has_news = asyncio.Event()
        self._ledger = Ledger(router_id, incarnation, self._has_news.set)
        self._outbox = outbox
        self._status = status
        self._metrics = metrics
        self._subjects = subjects
        self._clock = clock
        self._bus: Bus | None = None
        self._bequest = Bequest()
        self._askers: OrderedDict[int, None] = OrderedDict()
        self._is_asked = asyncio.Event()
        self._warned_s = float("-inf")
        core.tracker.ledger = self._ledger
        status.replicas_caught_up = False

    async def run(self, bus: Bus) -> None:
        """Follow the other routers until cancelled."""
        self._bus = bus
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hear(bus, self._subjects.to_replica(self._ledger.router_id)))
            group.create_task(self._hear(bus, self._subjects.all_reservations))
            group.create_task(self._answer(bus))
            group.create_task(self._catch_up())

    async def tell_forever(self) -> None:
        """Tell the others what is new, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._has_news.wait()
            self._has_news.clear()
            while (frame := self._next_frame()) is not None:
                await self._tell(frame)
                if not self._ledger.is_behind:
                    break
            await asyncio.sleep(FRAME_S)

    async def hand_over(self) -> None:
        """Give what is booked here to another router, for we are about to stop.

        Lot by lot; to the next router where one does not take it. With none, it is lost with us.
        """
        heirs = sorted(mirror.router_id for mirror in self._core.foreign.replicas)
        ours = len(self._core.tracker)
        for heir in heirs:
            while lot := tuple(islice(self._core.tracker.all_shared(), LOT)):
                if not await self._gives(heir, lot):
                    break
        if ours:
            log.info("%d of %d reservations handed over", ours - len(self._core.tracker), ours)

    def take(self, subject: str, payload: bytes) -> None:
        """Take in what another router says, or drop and count it."""
        if subject == self._subjects.reservations(self._ledger.router_id):
            return
        try:
            message = decode_replica_message(payload)
            self._check_sender(subject, message)
        except WireError as error:
            self._metrics.messages.labels("unreadable").inc()
            self._warn("a router's message on %s is unreadable and dropped: %s", subject, error)
            return
        self._metrics.messages.labels(type(message).__name__).inc()
        if isinstance(message, SnapshotWanted):
            self._note_asker(message.asked_by)
            return
        self._note_given(message)
        met = self._core.foreign.replicas.counts.met
        ours = [each for each in self._bequest.request_ids if each in self._core.tracker]
        self._outbox.perform(self._core.apply_peer(message, self._clock()))
        if isinstance(message, Frame | SnapshotPart):
            self._bequest.yielded(each for each in ours if each not in self._core.tracker)
        if self._core.foreign.replicas.counts.met > met:
            log.info("another router is heard on %s", subject)
            self._ledger.greet()

    async def _hear(self, bus: Bus, subject: str) -> None:
        subscription = await subscribe(bus, subject)
        async for message in subscription.messages:
            self.take(message.subject, message.data)

    async def _catch_up(self) -> None:
        """The others answer our first frame with one of theirs, which tells what we lack."""
        self._ledger.greet()
        patience_s = self._clock() + PATIENCE_S
        await asyncio.sleep(GREETING_S)
        while self._core.foreign.replicas.in_doubt and self._clock() < patience_s:
            await asyncio.sleep(GREETING_S / 5)
        self._status.replicas_caught_up = True

    async def _answer(self, bus: Bus) -> None:
        while True:
            await self._is_asked.wait()
            self._is_asked.clear()
            while self._askers:
                asked_by, _ = self._askers.popitem(last=False)
                await self._send_snapshot(bus, asked_by)

    async def _send_snapshot(self, bus: Bus, asked_by: int) -> None:
        subject = self._subjects.to_replica(asked_by)
        try:
            for part in self._ledger.snapshot():
                await self._publish(bus, subject, encode_replica_message(part))
                await asyncio.sleep(0)
        except BusError as error:
            log.debug("snapshot for router %d: %s; it will ask again", asked_by, error)
        else:
            self._metrics.snapshots_sent.inc()

    async def _gives(self, heir: int, lot: tuple[SharedReservation, ...]) -> bool:
        """Whether another router takes any of these reservations over."""
        before, given = len(self._core.tracker), HandedOver(self._ledger.router_id, lot)
        subject, request_ids = self._subjects.to_replica(heir), given.request_ids
        with suppress(BusError, TimeoutError):
            async with asyncio.timeout(GIVE_S):
                await self._publish(self._connected_bus(), subject, encode_replica_message(given))
                self._bequest.give(heir, request_ids)
                owners = self._core.foreign.replicas.owners
                while not self._bequest.is_settled(request_ids, owners):
                    await asyncio.sleep(FRAME_S)
        return len(self._core.tracker) < before

    def _note_given(self, message: PeerMessage) -> None:
        """What is said of what we gave away is told to who has it now."""
        if isinstance(message, HandedOver):
            self._bequest.take_back(message.request_ids)
        elif isinstance(message, ProgressTold):
            is_booked = message.request_id in self._core.tracker
            heirs = self._bequest.heirs(message, is_booked=is_booked)
            self._outbox.perform(TellReplica(heir, message) for heir in heirs)

    def _connected_bus(self) -> Bus:
        if self._bus is None:
            raise BusUnavailableError("not connected yet")
        return self._bus

    def _next_frame(self) -> Frame | None:
        return self._ledger.take_frame(self._core.tracker.shared, self._clock())

    async def _tell(self, frame: Frame) -> None:
        payload = encode_replica_message(frame)
        try:
            bus = self._connected_bus()
            await self._publish(bus, self._subjects.reservations(frame.router_id), payload)
        except BusError:
            self._metrics.frames_lost.inc(bool(frame.change_count))
        else:
            self._metrics.frames_sent.inc()
            self._metrics.bytes_sent.inc(len(payload))

    async def _publish(self, bus: Bus, subject: str, payload: bytes) -> None:
        if not bus.client.is_connected:
            raise BusUnavailableError("not connected")
        async with translated(subject):
            await bus.client.publish(subject, payload)

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
