"""Gauges and counters that are read off what a process knows, when Prometheus asks."""

import time
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from router.core import RouterCore
from router.metrics import RouterMetrics
from router.registrations import Registrations
from router.scheduler.affinity import AffinityTable
from router.selections import Selections
from router.status import ServiceStatus


class StateCollector(Collector):
    """Gauges that are read off the core and the status when Prometheus asks."""

    def __init__(self, core: RouterCore, status: ServiceStatus, metrics: RouterMetrics) -> None:
        self._core = core
        self._status = status
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The gauges of this moment."""
        yield InfoMetricFamily("kv_router", "What runs here", {"version": version("kv-router")})
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


class SelectionCollector(Collector):
    """Selections that may still be reserved, and what became of the others."""

    def __init__(self, selections: Selections, metrics: RouterMetrics) -> None:
        self._selections = selections
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The gauges of this moment."""
        self._selections.expire(time.monotonic())
        size_bytes = self._selections.size_bytes
        yield _gauge("selections", "Selections that may be reserved", len(self._selections))
        yield _gauge("selections_bytes", "About the memory of those", size_bytes)
        text = "Selections no longer kept, by what became of them"
        ended = CounterMetricFamily("kv_router_selections_ended", text, labels=("outcome",))
        for outcome, count in self._selections.counts.items():
            ended.add_metric((outcome,), count)
        yield ended


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
