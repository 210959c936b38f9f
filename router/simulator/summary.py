"""The metrics of one simulator run, and the points of a report's plots."""

from typing import TypeAlias

import numpy as np
from msgspec import Struct

from router.simulator.outcomes import GAP_BIN_ENDS_S, FloatArray, RequestResults

Curve: TypeAlias = tuple[FloatArray, FloatArray]
"""x and y of each point, in order of x."""

WINDOWS = 60
"""The number of windows of a plot over time."""

_FRACTIONS = np.concatenate([np.linspace(0, 0.98, 197), np.linspace(0.981, 1, 20)])


def distribution(values: FloatArray) -> Curve:
    """Return values and the fraction of all values that is no larger. Ignores NaN. O(n log n)."""
    known = values[~np.isnan(values)]
    if not len(known):
        return np.zeros(0), np.zeros(0)
    return np.quantile(known, _FRACTIONS), _FRACTIONS


def longer_gaps(outcomes: RequestResults) -> Curve:
    """Return inter-token latencies and the fraction of tokens that took longer."""
    counts = outcomes.gap_counts
    filled = np.flatnonzero(counts)
    if not len(filled):
        return np.zeros(0), np.zeros(0)
    shown = slice(max(int(filled[0]) - 1, 0), int(filled[-1]))
    return GAP_BIN_ENDS_S[shown], (1 - np.cumsum(counts) / counts.sum())[shown]


def hit_rate_over_time(outcomes: RequestResults) -> Curve:
    """Return the cached fraction of prompt tokens of the requests that arrived in each window."""
    edges = np.linspace(0, outcomes.arrivals_s[-1], WINDOWS + 1)
    isl_tokens, _ = np.histogram(outcomes.arrivals_s, edges, weights=outcomes.isl_tokens)
    cached, _ = np.histogram(outcomes.arrivals_s, edges, weights=outcomes.cached_tokens)
    known = isl_tokens > 0
    return edges[1:][known], cached[known] / isl_tokens[known]


def load_spread_over_time(outcomes: RequestResults) -> Curve:
    """Return the coefficient of variation of the workers' busy seconds in each window.

    Covers the time until the last arrival.
    """
    last = int(np.searchsorted(outcomes.sampled_s, outcomes.arrivals_s[-1], side="right"))
    step = max(last // WINDOWS, 1)
    shown = slice(0, last, step)
    busy_s = np.diff(outcomes.busy_s[shown], axis=0)
    mean_s = busy_s.mean(axis=1)
    known = mean_s > 0
    return outcomes.sampled_s[shown][1:][known], busy_s.std(axis=1)[known] / mean_s[known]


def ttft_over_time(outcomes: RequestResults) -> Curve:
    """Return the mean TTFT, in seconds, of the requests that arrived in each window."""
    served = ~np.isnan(outcomes.ttft_s)
    arrivals_s = outcomes.arrivals_s[served]
    edges = np.linspace(0, outcomes.arrivals_s[-1], WINDOWS + 1)
    count, _ = np.histogram(arrivals_s, edges)
    sums, _ = np.histogram(arrivals_s, edges, weights=outcomes.ttft_s[served])
    known = count > 0
    return edges[1:][known], sums[known] / count[known]


class Summary(Struct, frozen=True, kw_only=True):
    """Metrics of the served requests, with times in seconds.

    `hit_rate`: cached fraction of all prompt tokens. `load_spread`: the coefficient of variation
    (standard deviation by mean) of the workers' busy seconds. `makespan_s`: from the first arrival
    to the last end; `requests_per_s`: how many end in a second, while the middle 85 % of them do.
    `sessions`: those with all of their requests served; `session_mean_s`,
    `session_p99_s`: from the first arrival of one to its last end; NaN without any.
    `prefixes_computed`: how many times a token of a prefix that several prompts share was computed,
    on average; NaN if none is shared. `goodput`: the part of all requests with objectives that met
    them, refused ones included; NaN if none has any. `refused`: how many a router refused for them.
    """

    served: int
    unserved: int
    retried: int
    ttft_mean_s: float
    ttft_median_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    hit_rate: float
    load_spread: float
    makespan_s: float
    requests_per_s: float
    sessions: int
    session_mean_s: float
    session_p99_s: float
    prefixes_computed: float
    goodput: float
    refused: int


def summarize(outcomes: RequestResults) -> Summary:
    """Return the summary of a run. O(requests)."""
    served = ~np.isnan(outcomes.e2e_s)
    ttft_s, e2e_s = outcomes.ttft_s[served], outcomes.e2e_s[served]
    tpot_s = outcomes.tpot_s[served & ~np.isnan(outcomes.tpot_s)]
    prompt_tokens = float(outcomes.isl_tokens[served].sum())
    session_s = session_times_s(outcomes)
    return Summary(
        served=int(served.sum()),
        unserved=int((~served).sum()),
        retried=int((outcomes.attempts > 1).sum()),
        ttft_mean_s=_mean(ttft_s),
        ttft_median_s=_percentile(ttft_s, 50),
        ttft_p90_s=_percentile(ttft_s, 90),
        ttft_p99_s=_percentile(ttft_s, 99),
        e2e_mean_s=_mean(e2e_s),
        e2e_p99_s=_percentile(e2e_s, 99),
        tpot_mean_s=_mean(tpot_s),
        tpot_p99_s=_percentile(tpot_s, 99),
        hit_rate=float(outcomes.cached_tokens[served].sum()) / max(prompt_tokens, 1),
        load_spread=spread(outcomes.busy_s[-1]),
        makespan_s=_makespan_s(outcomes),
        requests_per_s=_requests_per_s(outcomes),
        sessions=len(session_s),
        session_mean_s=_mean(session_s),
        session_p99_s=_percentile(session_s, 99),
        prefixes_computed=_prefixes_computed(outcomes),
        goodput=_mean(outcomes.meets[~np.isnan(outcomes.meets)]),
        refused=int(outcomes.refused.sum()),
    )


def session_times_s(outcomes: RequestResults) -> FloatArray:
    """Return the time from the first arrival to the last end of each session.

    In order of their numbers; without those of which a request was not served. O(requests).
    """
    known = ~np.isnan(outcomes.session_ids)
    _, sessions = np.unique(outcomes.session_ids[known], return_inverse=True)
    arrivals_s = outcomes.arrivals_s[known]
    e2e_s = np.nan_to_num(outcomes.e2e_s[known], nan=np.inf)
    begin_s = np.full(sessions.max(initial=-1) + 1, np.inf)
    end_s = np.zeros(len(begin_s))
    np.minimum.at(begin_s, sessions, arrivals_s)
    np.maximum.at(end_s, sessions, arrivals_s + e2e_s)
    times_s: FloatArray = end_s - begin_s
    return times_s[np.isfinite(times_s)]


def _makespan_s(outcomes: RequestResults) -> float:
    ends_s = outcomes.arrivals_s + outcomes.e2e_s
    served = ~np.isnan(ends_s)
    return float(ends_s[served].max() - outcomes.arrivals_s[0]) if served.any() else float("nan")


def _requests_per_s(outcomes: RequestResults) -> float:
    """Return the rate at which requests end, without the first 5 % and the last 10 % of them."""
    ends_s = np.sort((outcomes.arrivals_s + outcomes.e2e_s)[~np.isnan(outcomes.e2e_s)])
    first, last = len(ends_s) // 20, len(ends_s) * 9 // 10
    span_s = float(ends_s[last] - ends_s[first]) if last > first else 0.0
    return (last - first) / span_s if span_s else float("nan")


def _prefixes_computed(outcomes: RequestResults) -> float:
    served = ~np.isnan(outcomes.ttft_s)
    uncached = outcomes.shared_tokens[served] - outcomes.cached_tokens[served]
    distinct = outcomes.distinct_shared_tokens
    return float(np.maximum(uncached, 0).sum()) / distinct if distinct else float("nan")


def spread(values: FloatArray) -> float:
    """Return the standard deviation divided by the mean; 0 if the mean is 0."""
    mean = float(values.mean())
    return float(values.std()) / mean if mean else 0.0


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _percentile(values: FloatArray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")
