"""A subscriber of a Dynamo fleet's NATS server that feeds the core; it writes nothing there.

    JetStream  radix-state, stream …-kv-events ─┐
    core NATS  kv-events, kv_metrics            ├─▶ DynamoFleet ─▶ RouterCore
               active_sequences_events ─────────┴─▶ Incumbents, in shadow mode

Workers publish on JetStream or on core NATS: both are read.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from nats.aio.subscription import Subscription
from nats.js.errors import NotFoundError

from router.core.commands import Apply, ApplyLoad, ApplySlice
from router.core.core import RouterCore
from router.discovery.dynamo.fleet.fleet import DynamoFleet
from router.discovery.dynamo.fleet.incumbents import Incumbents
from router.discovery.dynamo.fleet.messages import (
    Envelope,
    decode_envelope,
    decode_events,
    decode_forward_pass,
    decode_json_event,
    decode_load,
    decode_sequence,
)
from router.discovery.dynamo.fleet.settings import EVENTS, LOADS, PASSES, SEQUENCES, DynamoSettings
from router.discovery.dynamo.fleet.snapshot import decode_dump
from router.errors import WireError
from router.indexer.base import SnapshotError
from router.ingest.effect_runner import EffectRunner
from router.ingest.event_stream import CaughtUp, Message, NatsStream, Restarted, StreamReader
from router.ingest.object_store import ObjectBucket
from router.protocol.values import Rank, StreamPosition
from router.runtime.bus.connection import Bus, live_on_bus, subscribe, translated, until_closed
from router.runtime.bus.errors import BusError

log = logging.getLogger(__name__)

TELL_S = 0.005
"""The delay between updates of the core; changes received meanwhile are applied together."""

TICK_S = 0.5

LOOK_S = 0.5
"""The interval of the checks whether the stream exists."""

DUMP_LIMIT_BYTES = 1 << 28

Handler = Callable[[str, Envelope], None]


class DynamoFollower:
    """A follower of one fleet and, with `incumbents`, of the requests of its routers.

    `heard` counts messages by topic and outcome.
    """

    def __init__(
        self,
        core: RouterCore,
        effect_runner: EffectRunner,
        settings: DynamoSettings,
        fleet: DynamoFleet,
        incumbents: Incumbents | None,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._effect_runner = effect_runner
        self._settings = settings
        self._name = name
        self._clock = clock
        self._news = asyncio.Event()
        self._position: StreamPosition | None = None
        self.fleet = fleet
        self.incumbents = incumbents
        self.heard: Counter[tuple[str, str]] = Counter()
        self._has_subscribed = False
        self.is_connected = False
        """True while the server has the subscriptions: each message published now is received."""

    async def run(self) -> None:
        """Follow the fleet until cancelled; reconnects to its server after failures."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish_forever())
            group.create_task(self._tick_forever())
            group.create_task(
                live_on_bus(self._settings.nats_url, self._name, self._note_connection, self._live)
            )

    async def _live(self, bus: Bus) -> None:
        try:
            await self._read(bus)
        finally:
            self._has_subscribed = False

    async def _read(self, bus: Bus) -> None:
        handlers: dict[str, Handler] = {LOADS: self._take_load, PASSES: self._take_pass}
        if self._core.reads_events:
            handlers[EVENTS] = self._take_events
        if self.incumbents is not None:
            handlers[SEQUENCES] = partial(self._take_sequence, self.incumbents)
        async with asyncio.TaskGroup() as group:
            group.create_task(until_closed(bus))
            for topic, handler in handlers.items():
                for subject in self._settings.subjects(topic):
                    subscription = await subscribe(bus, subject)
                    group.create_task(self._listen(subscription, topic, handler))
            async with translated("subscriptions"):
                await bus.client.flush()
            self._note_subscribed()
            if self._core.reads_events:
                group.create_task(self._read_stream(bus))

    async def _listen(self, subscription: Subscription, topic: str, handler: Handler) -> None:
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
        """Apply a load message.

        1.0.2 publishes loads per namespace, so such a message may concern another component's
        worker and adds no rank.
        """
        may_appear = ".component." in subject
        self.fleet.take_load(decode_load(envelope), self._clock(), may_appear=may_appear)

    def _take_pass(self, _: str, envelope: Envelope) -> None:
        self.fleet.note_message(decode_forward_pass(envelope), self._clock())

    def _take_sequence(self, incumbents: Incumbents, _: str, envelope: Envelope) -> None:
        incumbents.take(decode_sequence(envelope), self._clock())

    def _refuse(self, subject: str, topic: str, error: WireError) -> None:
        self.heard[topic, "refused"] += 1
        self.fleet.complaints.add(f"a message on {subject} was dropped: {error}")

    def republish(self, rank: Rank) -> bool:
        """Request a checkpoint of a rank's blocks. Returns False for a rank of another fleet."""
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
                    log.info("%s: caught up with its end", self._settings.stream)
                case Restarted():
                    log.warning("%s was created anew", self._settings.stream)
            self._position = reader.position
            await asyncio.sleep(0)  # A backlog arrives in long runs: yield to other tasks.

    def _take_json(self, subject: str, payload: bytes) -> None:
        try:
            self.fleet.take_events(decode_json_event(payload), self._clock())
        except WireError as error:
            self._refuse(subject, EVENTS, error)
        else:
            self.heard[EVENTS, "read"] += 1
        self._news.set()

    async def _first_sequence(self, bus: Bus) -> int:
        """Return the first sequence number of the stream, once the stream exists.

        Raises BusUnavailableError.
        """
        has_said = False
        while True:
            async with translated(self._settings.stream):
                with suppress(NotFoundError):
                    info = await bus.js.stream_info(self._settings.stream)
                    return info.state.first_seq
            if not has_said:
                text = "no JetStream stream %s yet: its workers publish on core NATS or not at all"
                log.info(text, self._settings.stream)
                has_said = True
            await asyncio.sleep(LOOK_S)

    async def _restore(self, bus: Bus, first_sequence: int) -> None:
        """Start with the snapshot that Dynamo's routers kept of the messages that they purged."""
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
            log.warning("snapshot unusable: %s; the stream is read without it", error)
            return
        log.info("%d events read from a snapshot: the stream begins after them", len(events))
        self.fleet.restore(events, self._clock())
        self._news.set()

    # ── Updates of the core ──────────────────────────────────────────────────────────────────────

    async def _publish_forever(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            changed = self.fleet.take_changed()
            for rank in changed:
                for message in self.fleet.take_messages(rank):
                    self._core.handle(Apply(message), self._clock())
                    while self._core.handle(ApplySlice(), 0.0)[0]:
                        await asyncio.sleep(0)
            now_s = self._clock()
            for rank in changed:
                report = self.fleet.take_report(rank, now_s)
                if report is not None:
                    self._effect_runner.perform(self._core.handle(ApplyLoad(report), now_s)[1])
            await asyncio.sleep(TELL_S)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._clock()
            if self.is_connected:
                self._effect_runner.perform(self.fleet.tick(now_s))
            for sentence in self.fleet.complaints.take(now_s):
                log.warning("dynamo: %s", sentence)
            self._news.set()

    def _note_connection(self, has_connection: bool) -> None:
        """Update `is_connected` after a loss or a reconnection.

        A reconnected client restores its subscriptions; a new one has none yet.
        """
        if not has_connection:
            self.is_connected = False
        elif self._has_subscribed:
            self._note_subscribed()

    def _note_subscribed(self) -> None:
        """Restart the silence timeouts: no message could arrive before."""
        if not self.is_connected:
            self.fleet.restart_timeouts(self._clock())
        self.is_connected = self._has_subscribed = True


async def _nothing() -> None:
    """Create nothing: streams of a Dynamo fleet are only read."""
