"""The feed of a core from the bus: the registry, events, loads, and snapshots of its index."""

from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeAlias

from router.config.server import BusConfig
from router.core.core import RouterCore
from router.discovery.nats_catalogue import NatsCatalogue
from router.ingest.effect_runner import EffectRunner
from router.ingest.engine_polls import PollDuties
from router.ingest.event_stream import NatsStream
from router.ingest.snapshots import Snapshots
from router.ingest.subscriber import Subscriber
from router.observability.health import ServiceStatus
from router.observability.metrics import RouterMetrics
from router.protocol.subjects import Subjects
from router.protocol.values import StreamPosition
from router.publisher.follower.loop_slices import SliceScheduler
from router.runtime.bus.connection import Bus, StreamLimits, ensure_event_stream, until_closed

Task: TypeAlias = Coroutine[Any, Any, None]


class BusFeed:
    """The registry of workers and routers, and what keeps the core up to date from the bus."""

    def __init__(
        self,
        core: RouterCore,
        effect_runner: EffectRunner,
        status: ServiceStatus,
        metrics: RouterMetrics,
        subjects: Subjects,
        config: BusConfig,
        slices: SliceScheduler,
        duties: PollDuties,
    ) -> None:
        self._core = core
        self._effect_runner = effect_runner
        self._status = status
        self._subjects = subjects
        shared = (core, effect_runner, status, metrics, subjects)
        self.registry = NatsCatalogue(*shared, config.num_replicas)
        self._subscriber = Subscriber(*shared, slices, duties)
        self._stream_limits = StreamLimits(config.event_stream_max_bytes, config.num_replicas)
        self._snapshots = Snapshots(core, metrics, subjects, config)

    def tasks(self, bus: Bus) -> Iterable[Task]:
        """Yield the tasks of one connection."""
        yield until_closed(bus)
        yield self.registry.run(bus)
        yield self._events_after_registry(bus)
        yield self._subscriber.run_loads(bus)
        yield self._effect_runner.run(
            bus, lambda worker_id: self.registry.fetch_worker(bus, worker_id)
        )

    async def _events_after_registry(self, bus: Bus) -> None:
        """Follow the event stream once the registry is read.

        Events of ranks that are not announced would be dropped.
        """
        await self.registry.caught_up.wait()
        if self._core.reads_events:
            ensure = partial(ensure_event_stream, bus.js, self._subjects, self._stream_limits)
            stream = NatsStream(bus, self._subjects.event_stream, ensure)
            if self._subscriber.position is None:
                end = (await stream.state()).end
                self._subscriber.position = await self._snapshots.restore(bus, end)
            await self._subscriber.run_events(stream)
        else:
            self._status.events_caught_up = True

    async def take_snapshots(self, bus: Bus, is_our_turn: Callable[[], bool]) -> None:
        """Write a snapshot whenever one is due and it is this process's turn, until cancelled."""

        def position() -> StreamPosition | None:
            return self._subscriber.position if self._status.events_caught_up else None

        if self._core.reads_events:
            await self._snapshots.run(bus, position, is_our_turn)
