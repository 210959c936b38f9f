"""What engines say of prompts against what was predicted, read off the core when Prometheus asks.

Tenants are nobody's label: there may be any number of them.
"""

from collections import Counter as Counts
from collections.abc import Iterator
from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.closed_loop.closed_loop import ClosedLoop
from router.metrics import RouterMetrics

_WORKER = ("model_name", "routing_group", "worker_id")
_FOUND = (*_WORKER, "cause")

_TOTALS = {
    "prompt_tokens": "Prompt tokens of requests with a usage report",
    "cached_tokens": "Prompt tokens that its engine had cached",
    "predicted_tokens": "Prompt tokens predicted to be cached, where usage says what was",
    "mispredicted_tokens": "Tokens by which the two differ, request by request",
}


class PredictionCollector(Collector):
    """Totals of each worker, of at most `max_workers`, and what is found to be wrong."""

    def __init__(self, loop: ClosedLoop, metrics: RouterMetrics, max_workers: int) -> None:
        self._loop = loop
        self._max_workers = max_workers
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The totals of this moment. O(groups)."""
        yield self._found()
        yield from self._totals()
        yield CounterMetricFamily(
            "kv_router_prediction_groups_forgotten",
            "Groups of requests compared that there was no room for",
            value=self._loop.forgotten,
        )
        yield CounterMetricFamily(
            "kv_router_predictions_unjudged",
            "Requests whose surplus of cached tokens could not be looked into",
            value=self._loop.unjudged,
        )

    def _found(self) -> Metric:
        text = "Groups of requests (of a worker or all, a tenant or all) mispredicted for a cause"
        family = GaugeMetricFamily("kv_router_mispredicted", text, labels=_FOUND)
        counted: Counts[tuple[str, ...]] = Counts()
        for each in self._loop.findings():
            group = each.group
            worker = "" if group.worker_id is None else str(group.worker_id)
            counted[group.model_name, group.routing_group, worker, each.causes[0].name] += 1
        for labels, groups in islice(counted.items(), self._max_workers):
            family.add_metric(labels, groups)
        return family

    def _totals(self) -> Iterator[Metric]:
        workers = (
            ((group.model_name, group.routing_group, str(group.worker_id)), counts)
            for group, counts in self._loop.counts()
            if group.worker_id is not None and group.tenant is None
        )
        shown = list(islice(workers, self._max_workers))
        for name, text in _TOTALS.items():
            family = CounterMetricFamily(f"kv_router_worker_usage_{name}", text, labels=_WORKER)
            for labels, counts in shown:
                family.add_metric(labels, getattr(counts, name))
            yield family
