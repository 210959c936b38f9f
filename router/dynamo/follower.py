"""A Dynamo fleet on its NATS server ─▶ the core. It reads; nothing there is made or changed.

    JetStream  radix-state, stream …-kv-events ─┐
    core NATS  kv-events, kv_metrics            ├─▶ DynamoFleet ─▶ RouterCore
               active_sequences_events ─────────┴─▶ Incumbents, in shadow mode

Which of the two ways its workers speak is their affair: both are listened to.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from nats.js.errors import NotFoundError

from router.bus_errors import BusError
from router.core import RouterCore
from router.dynamo.fleet import DynamoFleet
from router.dynamo.incumbents import Incumbents
from router.dynamo.messages import (
    Envelope,
    decode_envelope,
    decode_events,
    decode_forward_pass,
    decode_json_event,
    decode_load,
    decode_sequence,
)
from router.dynamo.settings import EVENTS, LOADS, PASSES, SEQUENCES, DynamoSettings
from router.dynamo.snapshot import decode_dump
from router.errors import WireError
from router.indexer.errors import SnapshotError
from router.nats_stream import NatsStream
from router.object_bucket import ObjectBucket
from router.outbox import Outbox
from router.protocol.values import Rank, StreamPosition
from router.publisher.bus import Bus, live_on_bus, subscribe, translated, until_closed
from router.stream_reader import CaughtUp, Message, Restarted, StreamReader

log = logging.getLogger(__name__)

TELL_S = 0.005
"""What is heard meanwhile travels together."""

TICK_S = 0.5

LOOK_S = 0.5
"""How often it is looked whether the stream is there."""

DUMP_LIMIT_BYTES = 1 << 28

Handler = Callable[[str, Envelope], None]


class DynamoFollower:
    """Follows one fleet, and with `incumbents` what its routers do.

    `heard` counts messages by topic and outcome.
    """

    def __init__(
        self,
        core: RouterCore,
        outbox: Outbox,
        settings: DynamoSettings,
        fleet: DynamoFleet,
        incumbents: Incumbents | None,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._outbox = outbox
        self._settings = settings
        self._name = name
        self._clock = clock
        self._news = asyncio.Event()
        self._position: StreamPosition | None = None
        self.fleet = fleet
        self.incumbents = incumbents
        self.heard: Counter[tuple[str, str]] = Counter()
        self.is_connected = False

    async def run(self) -> None:
        """Follow the fleet until cancelled, whatever becomes of its server."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_forever())
            group.create_task(self._tick_forever())
            group.create_task(
                live_on_bus(self._settings.nats_url, self._name, self._connected, self._live)
            )

    async def _live(self, bus: Bus) -> None:
        handlers: dict[str, Handler] = {LOADS: self._take_load, PASSES: self._take_pass}
        if self._core.reads_events:
            handlers[EVENTS] = self._take_events
        if self.incumbents is not None:
            handlers[SEQUENCES] = partial(self._take_sequence, self.incumbents)
        async with asyncio.TaskGroup() as group:
            group.create_task(until_closed(bus))
            for topic, handler in handlers.items():
                for subject in self._settings.subjects(topic):
                    group.create_task(self._listen(bus, subject, topic, handler))
            if self._core.reads_events:
                group.create_task(self._read_stream(bus))

    async def _listen(self, bus: Bus, subject: str, topic: str, handler: Handler) -> None:
        subscription = await subscribe(bus, subject)
        async for message in subscription.messages:
            self._take(message.subject, topic, message.data, handler)

    def _take(self, subject: str, topic: str, payload: bytes, handler: Handler) -> None:
        try:
            handler(subject, decode_envelope(payload))
        except WireError as error:
            self._refuse(subject, topic, error)
        else:
            self.heard[topic, "read"] += 1
        self._news.set()

    def _take_events(self, _: str, envelope: Envelope) -> None:
        self.fleet.take_events(decode_events(envelope), self._clock())

    def _take_load(self, subject: str, envelope: Envelope) -> None:
        """1.0.2 speaks of a whole namespace; what it says of others' workers is not ours."""
        may_appear = ".component." in subject
        self.fleet.take_load(decode_load(envelope), self._clock(), may_appear=may_appear)

    def _take_pass(self, _: str, envelope: Envelope) -> None:
        self.fleet.hear(decode_forward_pass(envelope), self._clock())

    def _take_sequence(self, incumbents: Incumbents, _: str, envelope: Envelope) -> None:
        incumbents.take(decode_sequence(envelope), self._clock())

    def _refuse(self, subject: str, topic: str, error: WireError) -> None:
        self.heard[topic, "refused"] += 1
        self.fleet.complaints.add(f"a message on {subject} is dropped: {error}")

    def retell(self, rank: Rank) -> bool:
        """Tell the core again all that a rank holds; False if it is none of this fleet."""
        is_ours = self.fleet.require_checkpoint(rank)
        self._news.set()
        return is_ours

    # ── The stream of 1.0.2 ──────────────────────────────────────────────────────────────────────

    async def _read_stream(self, bus: Bus) -> None:
        if self._position is None:
            await self._restore(bus, await self._first_sequence(bus))
        source = NatsStream(bus, self._settings.stream, _nothing)
        reader = StreamReader(source, after=self._position)
        async for item in reader.read():
            match item:
                case Message(subject, payload):
                    self._take_json(subject, payload)
                case CaughtUp():
                    log.info("%s: read up to its end", self._settings.stream)
                case Restarted():
                    log.warning("%s was made anew", self._settings.stream)
            self._position = reader.position
            await asyncio.sleep(0)  # a backlog comes many messages at a time

    def _take_json(self, subject: str, payload: bytes) -> None:
        try:
            self.fleet.take_events(decode_json_event(payload), self._clock())
        except WireError as error:
            self._refuse(subject, EVENTS, error)
        else:
            self.heard[EVENTS, "read"] += 1
        self._news.set()

    async def _first_sequence(self, bus: Bus) -> int:
        """Where the stream begins; waits until it is there. Raises BusUnavailableError."""
        has_said = False
        while True:
            async with translated(self._settings.stream):
                with suppress(NotFoundError):
                    info = await bus.js.stream_info(self._settings.stream)
                    return info.state.first_seq
            if not has_said:
                text = "no JetStream stream %s yet: its workers speak on core NATS, or not at all"
                log.info(text, self._settings.stream)
                has_said = True
            await asyncio.sleep(LOOK_S)

    async def _restore(self, bus: Bus, first_sequence: int) -> None:
        """Begin with what Dynamo's routers kept of the messages that they have purged."""
        if first_sequence <= 1:
            return
        bucket = ObjectBucket(
            bus,
            self._settings.snapshot_bucket,
            "radix-state",
            limit_bytes=DUMP_LIMIT_BYTES,
            is_ours=False,
        )
        try:
            payload = await bucket.read()
            events = () if payload is None else await asyncio.to_thread(decode_dump, payload)
        except (SnapshotError, WireError, BusError) as error:
            log.warning("the stream is read without the snapshot: %s", error)
            return
        log.info("%d events from a snapshot: the stream begins later", len(events))
        self.fleet.restore(events, self._clock())
        self._news.set()

    # ── What the core is told ────────────────────────────────────────────────────────────────────

    async def _tell_forever(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            changed = self.fleet.take_changed()
            for rank in changed:
                for message in self.fleet.take_messages(rank):
                    self._core.apply(message, self._clock())
                    while self._core.apply_slice():
                        await asyncio.sleep(0)
            now_s = self._clock()
            for rank in changed:
                report = self.fleet.take_report(rank, now_s)
                if report is not None:
                    self._outbox.perform(self._core.apply_load(report, now_s))
            await asyncio.sleep(TELL_S)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._clock()
            if self.is_connected:
                self._outbox.perform(self.fleet.tick(now_s))
            for sentence in self.fleet.complaints.take(now_s):
                log.warning("dynamo: %s", sentence)
            self._news.set()

    def _connected(self, connected: bool) -> None:
        """Whoever was silent while we were deaf gets time to be heard."""
        if connected and not self.is_connected:
            self.fleet.hear_all(self._clock())
        self.is_connected = connected


async def _nothing() -> None:
    """Streams of others are not made here."""
