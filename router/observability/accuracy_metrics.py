"""Usage reports of engines against predictions, read from the core at scrape time.

There is no tenant label: the number of tenants is unbounded.
"""

from collections import Counter as Counts
from collections.abc import Iterator
from itertools import islice

from prometheus_client import CollectorRegistry

from router.accuracy.accuracy import AccuracyMonitor
from router.accuracy.sequential_test import Counts as AccuracyCounts
from router.runtime.process.metrics import Rows, counter, expose, expose_each, gauge

_WORKER = ("model_name", "routing_group", "worker_id")

_LIMITS: Rows = {
    "prediction_groups_forgotten": counter(
        "Groups of compared requests dropped because the limit of groups was reached", "forgotten"
    ),
    "predictions_unjudged": counter(
        "Requests with more cached tokens than predicted that could not be examined", "unjudged"
    ),
}
_TOTALS: Rows = {
    "prompt_tokens": counter("Prompt tokens of requests with a usage report"),
    "cached_tokens": counter("Prompt tokens that its engine had cached"),
    "predicted_tokens": counter("Prompt tokens predicted to be cached, for reported requests"),
    "mispredicted_tokens": counter("Tokens by which the two differ, request by request"),
}


def expose_accuracy(registry: CollectorRegistry, loop: AccuracyMonitor, max_workers: int) -> None:
    """Add totals and mispredictions of workers, of at most `max_workers`."""

    def found(loop: AccuracyMonitor) -> dict[tuple[str, ...], int]:
        counted: Counts[tuple[str, ...]] = Counts()
        for each in loop.findings():
            group = each.group
            worker = "" if group.worker_id is None else str(group.worker_id)
            counted[group.model_name, group.routing_group, worker, each.causes[0].name] += 1
        return dict(islice(counted.items(), max_workers))

    def totals() -> Iterator[tuple[tuple[object, ...], AccuracyCounts]]:
        workers = (
            ((group.model_name, group.routing_group, group.worker_id), counts)
            for group, counts in loop.counts()
            if group.worker_id is not None and group.tenant is None
        )
        return islice(workers, max_workers)

    text = "Groups of requests (of a worker or all, a tenant or all) mispredicted for a cause"
    mispredicted = gauge(text, found, *_WORKER, "cause")
    expose(registry, "kv_router_", {"mispredicted": mispredicted, **_LIMITS}, loop)
    expose_each(registry, "kv_router_worker_usage_", _TOTALS, _WORKER, totals)
