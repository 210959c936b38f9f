"""The capacity of each pool of workers, read at scrape time; at most `MOST_POOLS` are kept."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from router.core.core import RouterCore
from router.core.views.capacity import capacity
from router.protocol.capacity import PoolCapacity
from router.runtime.process.metrics import Rows, expose_each, gauge

_POOL: Rows = {
    "workers": gauge(
        "Workers, by whether they are schedulable",
        lambda pool: {
            "schedulable": pool.schedulable_workers,
            "other": pool.workers - pool.schedulable_workers,
        },
        "state",
    ),
    "confidence": gauge(
        "1 for what the figures of a pool are: measured, learning or unknown",
        lambda pool: {pool.confidence: 1},
        "confidence",
    ),
    "requests_per_second": gauge(
        "Requests that arrive: booked in the window, and waiting now", "requests_per_s"
    ),
    "supply_seconds_per_second": gauge("Schedulable ranks", "supply_s_per_s"),
    "demand_seconds_per_second": gauge(
        "Work that arrives, in seconds of a rank per second", "demand_s_per_s"
    ),
    "saturation": gauge("Demand, divided by supply"),
    "peak_saturation": gauge(
        "The highest saturation of the last six windows, by present supply", "peak_saturation"
    ),
    "headroom_seconds_per_second": gauge("Supply that is not in demand", "headroom_s_per_s"),
    "headroom_requests_per_second": gauge(
        "The same, as requests of the recent mean size", "headroom_requests_per_s"
    ),
    "booked_seconds": gauge("Seconds of ranks that the booked work takes", "booked_s"),
    "wait_seconds": gauge("Predicted wait of a new request of the mean size", "predicted_wait_s"),
    "kv_usage": gauge("Blocks of booked requests, as a fraction of the capacity", "kv_usage"),
    "waiting_for_worker": gauge(
        "Requests that wait because there is no schedulable worker",
        lambda pool: 0 if pool.schedulable_workers else pool.waiting_requests,
    ),
    "workers_needed": gauge("The fewest workers with saturation up to the target"),
    "workers_that_would_be_missed": gauge("Of those needed, the schedulable ones"),
    "workers_spare": gauge("Schedulable workers that could go, by peak saturation"),
    "workers_wanted": gauge("Workers needed beyond the schedulable ones"),
}


def expose_capacity(
    registry: CollectorRegistry, core: RouterCore, clock: Callable[[], float] = time.monotonic
) -> None:
    """Add the capacity of each pool. Unknown values have no sample."""

    def pools() -> Iterator[tuple[tuple[str, ...], PoolCapacity]]:
        for pool in capacity(core, clock()):
            yield (pool.model_name, pool.routing_group, pool.role), pool

    labels = ("model_name", "routing_group", "role")
    expose_each(registry, "kv_router_pool_", _POOL, labels, pools)
