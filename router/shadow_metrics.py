"""What shadow mode has compared, read when Prometheus asks."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.metrics import RouterMetrics
from router.shadow import Shadow

_PREFIX = "kv_router_shadow"
_SCOPE = ("model_name", "routing_group")


class ShadowCollector(Collector):
    """Totals of one shadow, by scope, and by side where both have their own."""

    def __init__(self, shadow: Shadow, metrics: RouterMetrics) -> None:
        self._shadow = shadow
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The totals of this moment."""
        requests = _counter("requests", "Requests compared, by how the choices differ", "outcome")
        isl = _counter("isl_tokens", "Prompt tokens of compared requests")
        cached = _counter("predicted_cached_tokens", "Prompt tokens predicted cached", "side")
        prefill = _counter("projected_prefill_tokens", "Prefill load of the chosen ranks", "side")
        for scope, totals in self._shadow.scopes.items():
            names = (scope.model_name, scope.routing_group)
            differed = totals.compared - totals.agreed - totals.tied
            requests.add_metric((*names, "agreed"), totals.agreed)
            requests.add_metric((*names, "tied"), totals.tied)
            requests.add_metric((*names, "differed"), differed)
            requests.add_metric((*names, "unknown_rank"), totals.unknown_ranks)
            isl.add_metric(names, totals.isl_tokens)
            for side, ours in (("ours", totals.ours), ("theirs", totals.theirs)):
                cached.add_metric((*names, side), ours.predicted_cached_tokens)
                prefill.add_metric((*names, side), ours.projected_prefill_tokens)
        yield from (requests, isl, cached, prefill)
        uncounted = CounterMetricFamily(f"{_PREFIX}_uncounted", "Requests of one scope too many")
        uncounted.add_metric((), self._shadow.uncounted)
        yield uncounted


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=(*_SCOPE, *labels))
