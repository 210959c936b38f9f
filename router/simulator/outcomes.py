"""The results of every request and the load of every worker, from which reports are made."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from math import inf, log, nan
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
    waited. `is_refused`: a router refused it, as no worker would meet its objectives.
    """

    __slots__ = (
        "arrival_s",
        "attempts",
        "cached_blocks",
        "finish_s",
        "first_token_s",
        "is_refused",
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
        self.is_refused = False
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
    never served, or has no second token. A request that never came, since one that it waited for
    was given up, arrived then. `session_ids`: NaN without a session. `shared_tokens`: the tokens of
    the prompt that another prompt has as well, in whole blocks, except for the last token, which is
    always computed; `distinct_shared_tokens`: those of all prompts, each counted once.
    `meets`: 1 if its objectives were met, else 0; NaN without any. `refused`: 1 if a router refused
    it for them. `gap_counts`: tokens by inter-token latency, see `GAP_BIN_ENDS_S`. `busy_s`:
    seconds worked up to each of `sampled_s`, shape (samples, workers).
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
    session_ids: FloatArray
    meets: FloatArray
    refused: FloatArray
    shared_tokens: FloatArray
    gap_counts: FloatArray
    sampled_s: FloatArray
    busy_s: FloatArray
    distinct_shared_tokens: int


def collected(
    outcomes: Sequence[RequestResult],
    block_size: int,
    gaps: Gaps,
    sampled_s: Sequence[float],
    busy_s: Sequence[Sequence[float]],
) -> RequestResults:
    """Return the results of a run, in columns. O(requests log requests + blocks)."""
    outcomes = sorted(outcomes, key=_arrival_s)
    shared_blocks, distinct_blocks = _shared_blocks([each.request for each in outcomes], block_size)
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
        meets=np.array([_meets(each) for each in outcomes]),
        refused=np.array([each.is_refused for each in outcomes], float),
        session_ids=np.array([_session_id(each.request) for each in outcomes], float),
        shared_tokens=np.array([blocks * block_size for blocks in shared_blocks], float),
        gap_counts=gaps.counts,
        sampled_s=np.array(sampled_s),
        busy_s=np.array(busy_s),
        distinct_shared_tokens=distinct_blocks * block_size,
    )


def _arrival_s(outcome: RequestResult) -> float:
    return outcome.arrival_s


def _meets(outcome: RequestResult) -> float:
    """Return whether a request's objectives were met: 1 or 0, or NaN without any."""
    asked = outcome.request
    if asked.slo_ttft_ms is None and asked.slo_tpot_ms is None:
        return nan
    ttft_s, stream_s = outcome.first_token_s - outcome.arrival_s, outcome.finish_s
    stream_s -= outcome.first_token_s
    is_met = asked.slo_ttft_ms is None or ttft_s * 1e3 <= asked.slo_ttft_ms
    most_s = inf
    if asked.slo_tpot_ms is not None:
        most_s = asked.slo_tpot_ms / 1e3 * (asked.osl_tokens - 1)
    return float(is_met and stream_s <= most_s + 1e-9)  # NaN: not served, and not met


def _session_id(request: TraceRequest) -> float:
    return nan if request.session is None else request.session


def _shared_blocks(requests: Sequence[TraceRequest], block_size: int) -> tuple[list[int], int]:
    """Return each prompt's leading blocks that another prompt has, and their number without copies.

    A block names all that is before it, so the shared ones of a prompt are its first.
    """
    holders: Counter[int] = Counter()
    limits_blocks = [(request.isl_tokens - 1) // block_size for request in requests]
    for request, limit in zip(requests, limits_blocks, strict=True):
        holders.update(request.sequence_hashes[:limit])
    shared_blocks = [
        bisect_left(request.sequence_hashes, True, 0, limit, key=lambda each: holders[each] == 1)
        for request, limit in zip(requests, limits_blocks, strict=True)
    ]
    return shared_blocks, sum(count > 1 for count in holders.values())
