"""The demand on a pool of ranks against its supply, and the number of workers that it needs."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.scheduler.capacity.arrivals import REQUESTS, WORK_COLUMNS, Arrivals
from router.scheduler.capacity.scaling import lacking_workers, spare_workers
from router.scheduler.capacity.service import Requests, seconds_of
from router.scheduler.terms import FloatArray


class PoolRanks(Struct, frozen=True, eq=False):
    """The schedulable ranks of a pool.

    `rows`: of the rank table. `workers`: the number of each one's worker, counted from 0.
    `most_running`: the engines' limit of requests at once, 0 if not known. `output_tokens`: of a
    usual request.
    """

    rows: FloatArray
    workers: npt.NDArray[np.int64]
    most_running: FloatArray
    output_tokens: float


class Demand(Struct, frozen=True, eq=False):
    """The demand on a pool, in requests and in seconds of its ranks per second.

    `workers`: the schedulable ones. `most_requests_per_s`: what each rank can serve, of requests of
    the recent mean size; None without requests in any window. `needed`: the fewest workers;
    `spare` could go, `lacking` are needed more.
    """

    requests_per_s: float
    workers: int
    seconds_per_request: float | None = None
    saturation: float = 0.0
    peak_saturation: float = 0.0
    most_requests_per_s: FloatArray | None = None
    needed: int = 0
    spare: int = 0
    lacking: int = 0


def _no_demand(workers: int, active_requests: int) -> Demand:
    """Return the demand without requests in any window; a worker of running ones stays."""
    needed = min(1, workers, active_requests)
    return Demand(0.0, workers, needed=needed, spare=workers - needed)


def demand_on(
    ranks: PoolRanks,
    arrivals: Arrivals,
    waiting_requests: int,
    active_requests: int,
    target: float,
    now_s: float,
) -> Demand:
    """Return the demand on a pool with a schedulable rank. O(ranks · windows).

    Requests that wait now count as arrived in this window. Those of a full queue do not count: they
    are sent again, some of them many times.
    """
    recent, length_s = arrivals.recent(now_s)
    earlier = arrivals.earlier(now_s)
    workers = int(ranks.workers.max()) + 1
    usual = recent if recent[REQUESTS] else earlier.sum(axis=0)
    if not usual[REQUESTS]:
        if not waiting_requests:
            return _no_demand(workers, active_requests)
        return Demand(waiting_requests / length_s, workers, needed=workers)  # of unknown size
    requests_per_s = (recent[REQUESTS] + waiting_requests) / length_s
    seconds = _seconds(ranks, usual.reshape(1, WORK_COLUMNS))[0]
    most = 1.0 / seconds
    saturation = requests_per_s / float(most.sum())
    peak = max(saturation, _peak(ranks, earlier, arrivals.window_s))
    of_workers = np.bincount(ranks.workers, most).astype(np.float64)
    spare = spare_workers(peak * most.sum(), of_workers, target)
    spare = min(spare, workers - 1) if active_requests else spare
    lacking = lacking_workers(requests_per_s, of_workers, target)
    needed = workers + lacking if lacking else workers - spare
    per_request = len(most) / float(most.sum())
    figures = (per_request, saturation, peak, most, needed, spare, lacking)
    return Demand(requests_per_s, workers, *figures)


def _seconds(ranks: PoolRanks, windows: FloatArray) -> FloatArray:
    """Return the seconds of each rank for the mean request of each window."""
    requests = Requests.mean(windows, ranks.output_tokens)
    return seconds_of(ranks.rows, requests, ranks.most_running)


def _peak(ranks: PoolRanks, earlier: FloatArray, window_s: float) -> float:
    """Return the highest saturation of earlier windows, by the present supply."""
    windows = earlier[earlier[:, REQUESTS] > 0]
    if not len(windows):
        return 0.0
    most = (1.0 / _seconds(ranks, windows)).sum(axis=1)
    return float((windows[:, REQUESTS] / window_s / most).max())
