"""The key-value bucket of workers, other routers and operators' orders."""

import asyncio
import logging
import time
from collections.abc import Iterator

from router.core.commands import OrderWorker, RemoveWorker, UpsertWorker
from router.core.core import RouterCore
from router.core.registered_workers import RegisteredWorker
from router.errors import WireError
from router.ingest.effect_runner import EffectRunner
from router.ingest.event_stream import CaughtUp, Message, NatsStream, Restarted, StreamReader
from router.observability.health import ServiceStatus
from router.observability.metrics import RouterMetrics
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
from router.protocol.values import U64_MAX, number_in
from router.runtime.bus.connection import (
    REQUEST_TIMEOUT_S,
    Bus,
    ensure_bucket,
    last_message,
    translated,
)
from router.runtime.bus.kv_lease import TTL_S

log = logging.getLogger(__name__)


class NatsCatalogue:
    """A follower of the bucket into the core, and a writer of operators' orders."""

    def __init__(
        self,
        core: RouterCore,
        effect_runner: EffectRunner,
        status: ServiceStatus,
        metrics: RouterMetrics,
        subjects: Subjects,
        num_replicas: int,
    ) -> None:
        self._core = core
        self._effect_runner = effect_runner
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
            self._metrics.stream_reopens.labels("workers").inc(reader.take_reopened())
            match item:
                case Message():
                    self._take(item)
                case CaughtUp():
                    self._status.registry_caught_up = True
                    self.caught_up.set()
                case Restarted():
                    log.warning("worker bucket recreated; workers announce themselves again")

    async def fetch_worker(self, bus: Bus, worker_id: int) -> None:
        """Read the announcement of an unknown worker. Raises BusUnavailableError."""
        subject = self._subjects.key(worker_key(worker_id))
        message = await last_message(bus.js, self._subjects.bucket_stream, subject)
        if message is not None:
            self._take(Message(subject, message.data or b"", message.headers or {}))

    async def order(self, bus: Bus, worker_id: int, lifecycle: Lifecycle) -> None:
        """Publish an operator's order to all routers and apply it. Raises BusUnavailableError."""
        subject = self._subjects.key(order_key(worker_id))
        async with translated(subject):
            await bus.js.publish(
                subject, encode_entry(WorkerOrder(lifecycle)), timeout=REQUEST_TIMEOUT_S
            )
        self._core.handle(OrderWorker(worker_id, lifecycle), 0.0)

    def routers(self) -> Iterator[RouterAnnouncement]:
        """Yield the routers with an unexpired announcement, this one included."""
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
        kind, _, digits = key.partition(".")
        try:
            entry_id = number_in(digits, U64_MAX)
            if entry_id is None:
                raise WireError(f"key {key[:100]!r} does not contain a worker id")
            self._note(kind, entry_id, None if is_gone else message.payload)
        except WireError as error:
            log.warning("ignored the unreadable registry entry %s: %s", key, error)
            self._metrics.announcements.labels("unreadable").inc()
        else:
            self._metrics.announcements.labels("withdrawn" if is_gone else "read").inc()

    def _note(self, kind: str, entry_id: int, value: bytes | None) -> None:
        if kind == "worker":
            self._note_worker(entry_id, value)
        elif kind == "order":
            lifecycle = None if value is None else decode_order(value).lifecycle
            self._core.handle(OrderWorker(entry_id, lifecycle), 0.0)
        elif kind == "router":
            self._note_router(entry_id, value)
        else:
            raise WireError(f"keys of kind {kind!r} are unknown")

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
                "worker %d (%s) announced at %s",
                worker_id,
                announcement.name,
                announcement.endpoint,
            )
        self._core.handle(UpsertWorker(announcement), time.monotonic())

    def _withdraw_worker(self, worker_id: int) -> None:
        """Remove an announced worker; a registered one is not the bucket's to remove."""
        known = self._core.fleet.get(worker_id)
        if known is None or not isinstance(known.announcement, RegisteredWorker):
            self._effect_runner.perform(
                self._core.handle(RemoveWorker(worker_id, "withdrawn"), 0.0)[1]
            )

    def _note_router(self, router_id: int, value: bytes | None) -> None:
        if value is None:
            self._routers.pop(router_id, None)
        else:
            self._routers[router_id] = (decode_router(value), time.monotonic())
