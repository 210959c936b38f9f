"""The results of every request and the load of every worker, from which reports are made."""

from collections.abc import Sequence
from math import log, nan
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.simulator.traces import TraceRequest

FloatArray: TypeAlias = npt.NDArray[np.float64]

GAP_BINS = 240
_SHORTEST_GAP_S, _LONGEST_GAP_S = 1e-3, 100.0
_BINS_A_LOG = GAP_BINS / log(_LONGEST_GAP_S / _SHORTEST_GAP_S)

GAP_BIN_ENDS_S = _SHORTEST_GAP_S * np.exp(np.arange(1, GAP_BINS + 1) / _BINS_A_LOG)
"""Ends of the bins of inter-token latencies, 5 % apart."""


class RequestResult:
    """The result of one request. Times are NaN until they are known.

    `placed_s`: the time of the last placement by a router; later than the request only if it
    waited.
    """

    __slots__ = (
        "arrival_s",
        "attempts",
        "cached_blocks",
        "finish_s",
        "first_token_s",
        "placed_s",
        "request",
        "worker_id",
    )

    def __init__(self, request: TraceRequest, arrival_s: float) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self.worker_id = -1
        self.attempts = 0
        self.cached_blocks = 0
        self.placed_s = nan
        self.first_token_s = nan
        self.finish_s = nan


class Gaps:
    """A histogram of inter-token latencies."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * GAP_BINS

    def add(self, gap_s: float, tokens: int) -> None:
        """Add `tokens` tokens with this inter-token latency."""
        bin_ = int(log(max(gap_s, _SHORTEST_GAP_S) / _SHORTEST_GAP_S) * _BINS_A_LOG)
        self._counts[min(bin_, GAP_BINS - 1)] += tokens

    @property
    def counts(self) -> FloatArray:
        """The number of tokens in each bin."""
        return np.array(self._counts, float)


class RequestResults(Struct, frozen=True, eq=False):
    """All results of one simulator run.

    `arrivals_s` to `worker_ids`: one value per request, in order of arrival; NaN if a request was
    never served, or has no second token. `gap_counts`: tokens by inter-token latency, see
    `GAP_BIN_ENDS_S`. `busy_s`: seconds worked up to each of `sampled_s`, shape (samples, workers).
    """

    arrivals_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    e2e_s: FloatArray
    wait_s: FloatArray
    isl_tokens: FloatArray
    cached_tokens: FloatArray
    attempts: FloatArray
    worker_ids: FloatArray
    gap_counts: FloatArray
    sampled_s: FloatArray
    busy_s: FloatArray


def collected(
    outcomes: Sequence[RequestResult],
    block_size: int,
    gaps: Gaps,
    sampled_s: Sequence[float],
    busy_s: Sequence[Sequence[float]],
) -> RequestResults:
    """Return the results of a run, in columns. O(requests)."""
    arrivals_s = np.array([each.arrival_s for each in outcomes])
    first_s = np.array([each.first_token_s for each in outcomes])
    finish_s = np.array([each.finish_s for each in outcomes])
    gap_tokens = np.array([each.request.osl_tokens - 1 or nan for each in outcomes])
    return RequestResults(
        arrivals_s=arrivals_s,
        wait_s=np.array([each.placed_s for each in outcomes]) - arrivals_s,
        ttft_s=first_s - arrivals_s,
        tpot_s=(finish_s - first_s) / gap_tokens,
        e2e_s=finish_s - arrivals_s,
        isl_tokens=np.array([each.request.isl_tokens for each in outcomes], float),
        cached_tokens=np.array([each.cached_blocks * block_size for each in outcomes], float),
        attempts=np.array([each.attempts for each in outcomes], float),
        worker_ids=np.array([each.worker_id for each in outcomes], float),
        gap_counts=gaps.counts,
        sampled_s=np.array(sampled_s),
        busy_s=np.array(busy_s),
    )
