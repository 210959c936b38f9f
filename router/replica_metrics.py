"""What routers tell each other, for Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core import RouterCore

_PREFIX = "kv_router_replica"


class ReplicaMetrics(Collector):
    """Counters that the adapter feeds, and what is read off the core when Prometheus asks."""

    def __init__(self, core: RouterCore, registry: CollectorRegistry) -> None:
        self._core = core
        self.frames_sent = Counter(
            f"{_PREFIX}_frames_sent", "Frames that the bus took", registry=registry
        )
        self.frames_lost = Counter(
            f"{_PREFIX}_frames_lost",
            "Frames with news that the bus did not take",
            registry=registry,
        )
        self.bytes_sent = Counter(
            f"{_PREFIX}_bytes_sent", "Bytes of frames that the bus took", registry=registry
        )
        self.snapshots_sent = Counter(
            f"{_PREFIX}_snapshots_sent", "Snapshots that others asked for", registry=registry
        )
        self.messages = Counter(
            f"{_PREFIX}_messages", "Messages of other routers", ("kind",), registry=registry
        )
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The totals of this moment."""
        foreign = self._core.foreign
        replicas, counts = foreign.replicas, foreign.replicas.counts
        booked = self._core.tracker.foreign_count
        yield _gauge("known", "Other routers that are alive", len(replicas))
        yield _gauge("in_doubt", "Of those, we lack something of so many", len(replicas.in_doubt))
        yield _gauge("reservations", "Reservations of other routers, booked here", booked)
        frames = counts.frames
        yield _counter("frames_applied", "Frames applied, in order", frames.applied)
        yield _counter("frames_doubled", "Frames that had come before", frames.doubled)
        yield _counter("frames_missing", "Times that frames were missing", frames.missing)
        yield _counter("differences", "Times that a digest differed", frames.differing)
        yield _counter("catch_ups", "Snapshots applied", frames.snapshots)
        yield _counter("gone", "Routers that fell silent", counts.gone)
        yield _counter("refused", "Messages of one router too many", counts.refused)
        yield _counter("stale", "Messages of a router's earlier life", counts.stale)
        yield _counter("yielded", "Reservations that another router took over", foreign.yielded)
        yield _counter(
            "inherited", "Reservations taken over from routers that stopped", foreign.inherited
        )
        yield _counter(
            "reservations_refused", "Others' reservations beyond max_reservations", foreign.refused
        )


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"{_PREFIX}_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=value)
