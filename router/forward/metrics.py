"""What a process that forwards counts, for Prometheus."""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.forward.prefill_metrics import PrefillMetrics
from router.forward.standing import Standing
from router.forward.tallies import Tally, Times
from router.http_client import HttpPool

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

Ended: TypeAlias = Literal[
    "answered", "passed_on", "refused", "failed", "broke_off", "client_gone", "query"
]


class ForwardMetrics:
    """Counters and histograms that adapters feed."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        prefix = "kv_router_forward_"

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(prefix + name, text, labels, registry=registry)

        self.requests = Tally(
            registry, prefix + "requests", "Requests, by how they ended", "route", "ended"
        )
        self.refusals = counter("refusals", "Requests refused here", "code")
        self.attempts = Tally(
            registry, prefix + "attempts", "Workers tried, by what became of it", "outcome"
        )
        self.tokenizations = counter(
            "tokenizations",
            "Text prompts, by source of their tokens: made here, an engine, the cache, unknown",
            "outcome",
        )
        self.migrations = counter(
            "migrations", "Streams whose worker failed in the middle, and what came then", "outcome"
        )
        self.probes = counter("probes", "Probes of workers' health", "standing", "outcome")
        self.missed_reports = counter(
            "missed_reports", "Reports of progress that no router received"
        )
        self.first_token = Times(
            registry,
            prefix + "time_to_first_token_seconds",
            "From a request's arrival to the first piece of its answer",
            _SECONDS,
        )
        self.deciding = Times(
            registry,
            prefix + "deciding_seconds",
            "Until a router has placed a request, its queue included",
            _SECONDS,
        )
        self.prefill = PrefillMetrics(registry)
        self.in_flight = self.body_bytes = 0
        gauge = Gauge(prefix + "in_flight", "Requests being answered", registry=registry)
        gauge.set_function(lambda: self.in_flight)
        gauge = Gauge(prefix + "body_bytes", "Bodies of these requests", registry=registry)
        gauge.set_function(lambda: self.body_bytes)

    def watch(self, pool: HttpPool, standing: Standing) -> None:
        """Show a pool's connections, too, and who is left alone."""
        self.registry.register(_Engines(pool, standing))

    def exposition(self) -> bytes:
        """Everything, in the text format."""
        return generate_latest(self.registry)


class _Engines(Collector):
    def __init__(self, pool: HttpPool, standing: Standing) -> None:
        self._pool = pool
        self._standing = standing

    def collect(self) -> Iterator[Metric]:
        """The state of this moment."""
        name = "kv_router_forward_engine_connections"
        yield GaugeMetricFamily(name, "Connections to engines", value=self._pool.open_connections)
        left_alone = len(self._standing.ejected())
        name = "kv_router_forward_ejected_workers"
        yield GaugeMetricFamily(name, "Workers that are left alone", value=left_alone)
