"""The router's side of a measurement: the event stream, read into a core as a router does it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any, NamedTuple

from router.config.router import RouterConfig
from router.core.commands import Apply, ApplySlice, Command, UpsertWorker
from router.core.core import RouterCore
from router.core.settings import CoreSettings
from router.indexer.base import Indexer
from router.indexer.event_log import LogVerdict
from router.indexer.factory import make_indexer
from router.ingest.effect_runner import EffectRunner
from router.ingest.engine_polls import PollDuties
from router.ingest.event_stream import NatsStream
from router.ingest.subscriber import Subscriber
from router.observability.health import ServiceStatus
from router.observability.metrics import RouterMetrics
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.events import EventBatch
from router.protocol.subjects import Subjects
from router.protocol.values import SCHEME, Identity
from router.publisher.follower.loop_slices import SliceScheduler
from router.runtime.bus.connection import Bus, StreamLimits, ensure_event_stream

IDENTITY = Identity(SCHEME, 16)
INCARNATION = 1
POLL_S = 0.001


class Applied(NamedTuple):
    """When a worker's blocks were visible as of an event."""

    worker_id: int
    event_id: int
    visible_ns: int


class TimedCore:
    """A core that notes when each message was applied to its last slice."""

    __slots__ = ("_applying", "_core", "applied", "index")

    def __init__(self) -> None:
        self._core = RouterCore(*core_parts())
        self.index = self._core.index
        self.applied: list[Applied] = []
        self._applying: tuple[int, int] | None = None

    def handle(self, command: Command, now_s: float) -> tuple[Any, Any]:
        """Carry out a command."""
        answer = self._core.handle(command, now_s)
        if isinstance(command, Apply):
            message = command.message
            is_batch = isinstance(message, EventBatch)
            event_id = message.last_event_id if is_batch else message.event_id
            if answer[0] in (LogVerdict.APPLY, LogVerdict.NEW_LIFE):
                self._applying = message.worker_id, event_id
        elif isinstance(command, ApplySlice) and not answer[0] and self._applying is not None:
            self.applied.append(Applied(*self._applying, time.monotonic_ns()))
            self._applying = None
        return answer


class CoreReader:
    """A core that knows its workers, fed by the event stream and nothing else.

    No registry, no load reports and no ticks: these take no part in how soon a block is visible.
    """

    def __init__(
        self, namespace: str, workers: int, core: RouterCore | TimedCore | None = None
    ) -> None:
        self.subjects = Subjects(namespace)
        self.core = core or RouterCore(*core_parts())
        for worker_id in range(workers):
            self.core.handle(UpsertWorker(announcement(worker_id)), time.monotonic())
        metrics = RouterMetrics()
        self._workers = workers
        self._status = ServiceStatus("nats://measured", needs_workers=False)
        self._subscriber = Subscriber(
            self.core,
            EffectRunner(self.subjects, metrics),
            self._status,
            metrics,
            self.subjects,
            SliceScheduler(),
            PollDuties(None),
        )

    @asynccontextmanager
    async def following(self, bus: Bus) -> AsyncIterator[None]:
        """The stream is read while inside."""
        ensure = partial(ensure_event_stream, bus.js, self.subjects, StreamLimits())
        stream = NatsStream(bus, self.subjects.event_stream, ensure)
        reading = asyncio.create_task(self._subscriber.run_events(stream))
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    async def until_caught_up(self) -> None:
        """Wait until everything is applied that was in the stream at the start."""
        while not self._status.events_caught_up:
            await asyncio.sleep(POLL_S)

    def require_held(self, blocks: int) -> None:
        """Raise RuntimeError unless every rank adds up, to `blocks` blocks in all."""
        states = self.core.index.rank_states()
        held = sum(sum(state.held.counts) for state in states)
        if (len(states), held) != (self._workers, blocks):
            raise RuntimeError(f"{len(states)} ranks add up, to {held:,} of {blocks:,} blocks")


def core_parts() -> tuple[CoreSettings, Callable[[], Indexer], Random]:
    """What a router makes its core of."""
    config = RouterConfig()
    return config.core, lambda: make_indexer(config.index_settings), Random(1)


def announcement(worker_id: int) -> WorkerAnnouncement:
    """A worker with one rank."""
    return WorkerAnnouncement(
        worker_id=worker_id,
        name=f"w{worker_id}",
        endpoint=f"http://w{worker_id}",
        identity=IDENTITY,
        total_kv_blocks=65_536,
        max_num_batched_tokens=8192,
        incarnation=INCARNATION,
    )
