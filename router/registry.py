"""Who exists, as the key-value bucket says: workers, other routers, operators' orders."""

import asyncio
import logging
import time
from collections.abc import Iterator

from router.core import RouterCore
from router.errors import WireError
from router.metrics import RouterMetrics
from router.nats_stream import NatsStream
from router.outbox import Outbox
from router.protocol.catalogue import (
    Lifecycle,
    RouterAnnouncement,
    WorkerOrder,
    decode_order,
    decode_router,
    decode_worker,
    encode_entry,
    order_key,
    worker_key,
)
from router.protocol.subjects import Subjects
from router.publisher.announcer import TTL_S
from router.publisher.bus import REQUEST_TIMEOUT_S, Bus, ensure_bucket, last_message, translated
from router.registrations import RegisteredWorker
from router.status import ServiceStatus
from router.stream_reader import CaughtUp, Message, Restarted, StreamReader

log = logging.getLogger(__name__)


class Registry:
    """Follows the bucket into the core, and writes operators' orders to it."""

    def __init__(
        self,
        core: RouterCore,
        outbox: Outbox,
        status: ServiceStatus,
        metrics: RouterMetrics,
        subjects: Subjects,
        num_replicas: int,
    ) -> None:
        self._core = core
        self._outbox = outbox
        self._status = status
        self._metrics = metrics
        self._subjects = subjects
        self._num_replicas = num_replicas
        self._routers: dict[int, tuple[RouterAnnouncement, float]] = {}
        self.caught_up = asyncio.Event()

    async def run(self, bus: Bus) -> None:
        """Follow the bucket until cancelled."""
        stream = self._subjects.bucket_stream
        source = NatsStream(bus, stream, lambda: self._ensure(bus))
        reader = StreamReader(source, latest_only=True)
        async for item in reader.read():
            self._metrics.bus.stream_reopens.labels("workers").inc(reader.take_reopened())
            match item:
                case Message():
                    self._take(item)
                case CaughtUp():
                    self._status.registry_caught_up = True
                    self.caught_up.set()
                case Restarted():
                    log.warning("the bucket of workers was made anew; workers announce themselves")

    async def fetch_worker(self, bus: Bus, worker_id: int) -> None:
        """Read one worker's announcement, which we lack. Raises BusUnavailableError."""
        subject = self._subjects.key(worker_key(worker_id))
        message = await last_message(bus.js, self._subjects.bucket_stream, subject)
        if message is not None:
            self._take(Message(subject, message.data or b"", message.headers or {}))

    async def order(self, bus: Bus, worker_id: int, lifecycle: Lifecycle) -> None:
        """Write an operator's order for all routers, then obey it. Raises BusUnavailableError."""
        subject = self._subjects.key(order_key(worker_id))
        async with translated(subject):
            await bus.js.publish(
                subject, encode_entry(WorkerOrder(lifecycle)), timeout=REQUEST_TIMEOUT_S
            )
        self._core.order_worker(worker_id, lifecycle)

    def routers(self) -> Iterator[RouterAnnouncement]:
        """Routers that have renewed their announcement in time, this one included."""
        now_s = time.monotonic()
        for router_id, (announcement, seen_s) in sorted(self._routers.items()):
            if now_s - seen_s < TTL_S:
                yield announcement
            else:
                del self._routers[router_id]

    async def _ensure(self, bus: Bus) -> None:
        await ensure_bucket(bus.js, self._subjects, self._num_replicas)

    def _take(self, message: Message) -> None:
        key = message.subject.removeprefix(self._subjects.key(""))
        is_gone = "KV-Operation" in message.headers or not message.payload
        kind, _, entry_id = key.partition(".")
        try:
            if not entry_id.isdecimal():
                raise WireError(f"key {key!r} names no worker")
            self._note(kind, int(entry_id), None if is_gone else message.payload)
        except WireError as error:
            log.warning("registry entry %s is unreadable and ignored: %s", key, error)
            self._metrics.events.announcements.labels("unreadable").inc()
        else:
            self._metrics.events.announcements.labels("withdrawn" if is_gone else "read").inc()

    def _note(self, kind: str, entry_id: int, value: bytes | None) -> None:
        if kind == "worker":
            self._note_worker(entry_id, value)
        elif kind == "order":
            lifecycle = None if value is None else decode_order(value).lifecycle
            self._core.order_worker(entry_id, lifecycle)
        elif kind == "router":
            self._note_router(entry_id, value)
        else:
            raise WireError(f"keys of kind {kind!r} are not known")

    def _note_worker(self, worker_id: int, value: bytes | None) -> None:
        if value is None:
            self._withdraw_worker(worker_id)
            return
        announcement = decode_worker(value)
        if announcement.worker_id != worker_id:
            raise WireError(f"announces worker {announcement.worker_id}")
        known = self._core.fleet.get(worker_id)
        if known is None or known.announcement != announcement:
            log.info(
                "worker %d (%s) is announced at %s",
                worker_id,
                announcement.name,
                announcement.endpoint,
            )
        self._core.upsert_worker(announcement, time.monotonic())

    def _withdraw_worker(self, worker_id: int) -> None:
        """What a caller registered is not the bucket's to withdraw."""
        known = self._core.fleet.get(worker_id)
        if known is None or not isinstance(known.announcement, RegisteredWorker):
            self._outbox.perform(self._core.remove_worker(worker_id, "withdrawn"))

    def _note_router(self, router_id: int, value: bytes | None) -> None:
        if value is None:
            self._routers.pop(router_id, None)
        else:
            self._routers[router_id] = (decode_router(value), time.monotonic())
