"""What a guarded server counts, for Prometheus."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.security.edge import Edge


class EdgeCollector(Collector):
    """Read off the edge when Prometheus asks."""

    def __init__(self, edge: Edge, registry: CollectorRegistry) -> None:
        self._edge = edge
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Everything of this moment."""
        yield GaugeMetricFamily(
            "kv_router_tokens",
            "Valid bearer tokens; 0: no token is required",
            value=self._edge.guard.token_count,
        )
        failures = CounterMetricFamily(
            "kv_router_security_reload_failures",
            "Changed files that could not be used, so that what was before counts on",
            labels=["files"],
        )
        for files in self._edge.watched:
            failures.add_metric([files.what], files.failures)
        yield failures
