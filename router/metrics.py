"""What a router counts, for Prometheus. One registry per router; gauges are read at scrape time."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from router.core import RouterCore
from router.status import ServiceStatus

_DECISION_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class RouterMetrics:
    """Counters and histograms that adapters feed."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.decisions = self._counter("decisions", "Ranks chosen", "command")
        self.decision_seconds = Histogram(
            "kv_router_decision_seconds",
            "Time to hash, match, weigh and book a request",
            buckets=_DECISION_BUCKETS_S,
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of chosen requests")
        self.predicted_cached_tokens = self._counter(
            "predicted_cached_tokens", "Prompt tokens predicted to be cached where they were sent"
        )
        self.log_messages = self._counter("log_messages", "Messages of the event log", "outcome")
        self.load_reports = self._counter("load_reports", "Load reports", "outcome")
        self.announcements = self._counter("announcements", "Registry entries read", "outcome")
        self.checkpoints_requested = self._counter(
            "checkpoints_requested", "Checkpoints asked of agents", "reason"
        )
        self.workers_gone = self._counter("workers_gone", "Workers taken out", "reason")
        self.reservations_dropped = self._counter(
            "reservations_dropped", "Reservations that ended without being freed", "reason"
        )
        self.outbox_overflows = self._counter(
            "outbox_overflows", "Effects dropped because the outbox was full"
        )
        self.outbox_failures = self._counter(
            "outbox_failures", "Effects that the bus did not take", "effect"
        )
        self.bus_losses = self._counter("bus_losses", "Times the connection to NATS was lost")
        self.stream_reopens = self._counter(
            "stream_reopens", "Times a stream was opened again after a doubt", "stream"
        )
        self.requests = self._counter("requests", "Requests answered", "interface", "route", "code")
        self.refusals = self._counter("refusals", "Requests refused", "interface", "code")

    def exposition(self) -> bytes:
        """Everything, in the text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kv_router_{name}", text, labels, registry=self.registry)


class StateCollector(Collector):
    """Gauges that are read off the core and the status when Prometheus asks."""

    def __init__(self, core: RouterCore, status: ServiceStatus, metrics: RouterMetrics) -> None:
        self._core = core
        self._status = status
        metrics.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges of this moment."""
        now_s = time.monotonic()
        yield _gauge("up", "1 while the process runs", 1)
        yield _gauge("bus_connected", "1 while connected to NATS", self._core.fleet.is_connected)
        yield _gauge("ready", "1 while ready", self._status.readiness(self._core).is_ready)
        yield _gauge("workers", "Workers known", len(self._core.fleet))
        yield _gauge("reservations", "Live reservations", len(self._core.tracker))
        yield from self._per_scope()
        yield from self._per_rank(now_s)

    def _per_scope(self) -> Iterator[GaugeMetricFamily]:
        blocks = GaugeMetricFamily(
            "kv_router_index_blocks", "Distinct blocks held", labels=("model_name", "routing_group")
        )
        for scope, count in self._core.index.block_counts().items():
            blocks.add_metric((scope.model_name, scope.routing_group), count)
        yield blocks

    def _per_rank(self, now_s: float) -> Iterator[GaugeMetricFamily]:
        labels = ("worker_id", "dp_rank")
        held = GaugeMetricFamily("kv_router_worker_held_blocks", "Blocks held", labels=labels)
        active = GaugeMetricFamily(
            "kv_router_worker_active_requests", "Requests booked", labels=labels
        )
        trust = GaugeMetricFamily(
            "kv_router_worker_trust",
            "1 for the trust state a rank is in",
            labels=(*labels, "state"),
        )
        for worker in self._core.fleet:
            for rank in worker.announcement.ranks:
                names = (str(rank.worker_id), str(rank.dp_rank))
                held.add_metric(names, self._core.index.held_blocks(rank))
                active.add_metric(names, self._core.tracker.active(rank).active_requests)
                trust.add_metric((*names, self._core.trust(rank, now_s).state), 1)
        yield from (held, active, trust)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kv_router_{name}", text, value=value)
