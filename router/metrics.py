"""What a router counts, for Prometheus. One registry per router; gauges are read at scrape time."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core import RouterCore
from router.registrations import Registrations
from router.scheduler.affinity import AffinityTable
from router.sequence.rank_table import BUSY
from router.status import ServiceStatus

_DECISION_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_WAIT_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_SNAPSHOT_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


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
        self.wait_seconds = Histogram(
            "kv_router_wait_seconds",
            "Time in the queue of requests that had to wait and were placed",
            ("policy_class",),
            buckets=_WAIT_BUCKETS_S,
            registry=self.registry,
        )
        self.withdrawn = self._counter(
            "withdrawn", "Requests whose callers hung up while they waited"
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
        self.snapshots_written = self._counter("snapshots_written", "Snapshots written")
        self.snapshot_bytes = self._counter("snapshot_bytes", "Bytes of snapshots written")
        self.snapshot_failures = self._counter(
            "snapshot_failures", "Snapshots that could not be written"
        )
        self.snapshots_restored = self._counter("snapshots_restored", "Snapshots restored")
        self.snapshot_restored_blocks = self._counter(
            "snapshot_restored_blocks", "Blocks restored from snapshots, per rank and tier"
        )
        self.snapshots_unusable = self._counter(
            "snapshots_unusable", "Snapshots passed over at the start", "reason"
        )
        self.snapshot_seconds = Histogram(
            "kv_router_snapshot_seconds",
            "Time of each step of a snapshot: take, write, read, restore",
            ("step",),
            buckets=_SNAPSHOT_BUCKETS_S,
            registry=self.registry,
        )
        self.follower_failures = self._counter(
            "follower_failures", "Followers of engines that failed, and began anew"
        )
        self.session_store_failures = self._counter(
            "session_store_failures", "Times that Redis did not answer about a session", "operation"
        )
        self.sessions_moved = self._counter(
            "sessions_moved", "Requests placed again where another router had bound their session"
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

    def collect(self) -> Iterator[Metric]:
        """The gauges of this moment."""
        now_s = time.monotonic()
        yield _gauge("up", "1 while the process runs", 1)
        if self._status.has_bus:
            connected = self._core.fleet.is_connected
            yield _gauge("bus_connected", "1 while connected to NATS", connected)
        yield _gauge("ready", "1 while ready", self._status.readiness(self._core).is_ready)
        yield _gauge("workers", "Workers known", len(self._core.fleet))
        yield _gauge("reservations", "Live reservations", len(self._core.tracker))
        yield _gauge(
            "waiting_requests_max",
            "Limit on requests that wait",
            self._core.waiting.limits.max_requests,
        )
        yield from self._per_scope()
        yield from self._per_class()
        yield from self._index_counters()
        yield from self._per_rank(now_s)

    def _per_scope(self) -> Iterator[GaugeMetricFamily]:
        gauges = [_scope_gauge(f"index_{field}", text) for field, text in _INDEX_STATS.items()]
        for scope, stats in self._core.index.stats().items():
            for gauge, field in zip(gauges, _INDEX_STATS, strict=True):
                gauge.add_metric((scope.model_name, scope.routing_group), getattr(stats, field))
        predicted = _scope_gauge("predicted_blocks", "Entries guessed from decisions")
        for scope, entries in self._core.predictions.entry_counts().items():
            predicted.add_metric((scope.model_name, scope.routing_group), entries)
        yield from (*gauges, predicted)

    def _per_class(self) -> Iterator[GaugeMetricFamily]:
        labels = ("model_name", "routing_group", "policy_class")
        requests = GaugeMetricFamily(
            "kv_router_waiting_requests", "Requests waiting", labels=labels
        )
        tokens = GaugeMetricFamily(
            "kv_router_waiting_tokens", "Their uncached prompt tokens", labels=labels
        )
        for scope, queue in self._core.waiting.queues():
            for each in queue.queues:
                names = (scope.model_name, scope.routing_group, each.settings.name)
                requests.add_metric(names, each.usage.requests)
                tokens.add_metric(names, each.usage.cost_tokens)
        yield from (requests, tokens)

    def _index_counters(self) -> Iterator[CounterMetricFamily]:
        expired, pruned = self._core.predictions.freed_blocks()
        refused = self._core.index.refused_messages
        differences, stale = self._core.index.differences, self._core.fleet.stale_reports
        yield _counter("index_differences", "Ranks found to differ from their agent's", differences)
        yield _counter("load_reports_stale", "Load reports that came doubled or too late", stale)
        yield _counter("index_refused_messages", "Messages over the limit on blocks", refused)
        yield _counter("predicted_blocks_expired", "Guessed entries that expired", expired)
        yield _counter("predicted_blocks_pruned", "Guessed entries pruned for want of room", pruned)
        prompts = self._core.predictions.refused_prompts
        yield _counter("predicted_prompts_refused", "Booked prompts that found no room", prompts)

    def _per_rank(self, now_s: float) -> Iterator[GaugeMetricFamily]:
        labels = ("worker_id", "dp_rank")
        held = GaugeMetricFamily("kv_router_worker_held_blocks", "Blocks held", labels=labels)
        active = GaugeMetricFamily(
            "kv_router_worker_active_requests", "Requests booked", labels=labels
        )
        busy = GaugeMetricFamily(
            "kv_router_worker_busy", "1 above a threshold, as of the last decision", labels=labels
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
                busy.add_metric(names, self._core.ranks.row(rank)[BUSY])
                active.add_metric(names, self._core.tracker.active(rank).active_requests)
                trust.add_metric((*names, self._core.trust(rank, now_s).state), 1)
        yield from (held, active, busy, trust)


class SessionCollector(Collector):
    """Sessions that this router knows of."""

    def __init__(self, table: AffinityTable, metrics: RouterMetrics) -> None:
        self._table = table
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The gauges of this moment."""
        yield _gauge("sessions", "Sessions bound to a rank, as known here", len(self._table))
        yield _counter("sessions_expired", "Sessions forgotten as idle", self._table.expired)
        yield _counter("sessions_evicted", "Sessions forgotten for room", self._table.evicted)


class RegistrationCollector(Collector):
    """How many ranks callers have registered, and how many they may."""

    def __init__(self, registrations: Registrations, metrics: RouterMetrics) -> None:
        self._registrations = registrations
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The gauges of this moment."""
        limit = self._registrations.max_ranks
        yield _gauge("registered_ranks", "Ranks registered", self._registrations.rank_count)
        yield _gauge("registered_ranks_max", "Limit on ranks registered", limit)


_INDEX_STATS = {
    "blocks": "Distinct blocks in the index, those waiting to be swept included",
    "max_blocks": "Limit on distinct blocks",
    "holder_sets": "Distinct sets of several holders",
    "unswept_holders": "Cleared ranks whose blocks are not freed yet",
    "checked_answers": "Searches that were found a second time by walking",
    "differing_answers": "Overlaps that a second, walking search found to differ",
}


def _scope_gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kv_router_{name}", text, labels=("model_name", "routing_group"))


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"kv_router_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kv_router_{name}", text, value=value)
