"""What the plots of a report show, as points."""

from typing import TypeAlias

import numpy as np

from router.simulator.outcomes import GAP_BIN_ENDS_S, FloatArray, Outcomes

Curve: TypeAlias = tuple[FloatArray, FloatArray]
"""x and y of each point, in order of x."""

WINDOWS = 60
"""Into how many windows a run is cut where something is shown over time."""

_FRACTIONS = np.concatenate([np.linspace(0, 0.98, 197), np.linspace(0.981, 1, 20)])


def distribution(values: FloatArray) -> Curve:
    """Values, and the fraction of all that is no larger. NaN count as nothing. O(n log n)."""
    known = values[~np.isnan(values)]
    if not len(known):
        return np.zeros(0), np.zeros(0)
    return np.quantile(known, _FRACTIONS), _FRACTIONS


def longer_gaps(outcomes: Outcomes) -> Curve:
    """Inter-token latencies, and the fraction of tokens that took longer, while any did."""
    counts = outcomes.gap_counts
    filled = np.flatnonzero(counts)
    if not len(filled):
        return np.zeros(0), np.zeros(0)
    shown = slice(max(int(filled[0]) - 1, 0), int(filled[-1]))
    return GAP_BIN_ENDS_S[shown], (1 - np.cumsum(counts) / counts.sum())[shown]


def hit_rate_over_time(outcomes: Outcomes) -> Curve:
    """Cached tokens of all prompt tokens, of the requests that came in each window."""
    edges = np.linspace(0, outcomes.arrivals_s[-1], WINDOWS + 1)
    isl_tokens, _ = np.histogram(outcomes.arrivals_s, edges, weights=outcomes.isl_tokens)
    cached, _ = np.histogram(outcomes.arrivals_s, edges, weights=outcomes.cached_tokens)
    known = isl_tokens > 0
    return edges[1:][known], cached[known] / isl_tokens[known]


def load_spread_over_time(outcomes: Outcomes) -> Curve:
    """The coefficient of variation of the workers' busy seconds, in each window, as long as
    requests come.
    """
    last = int(np.searchsorted(outcomes.sampled_s, outcomes.arrivals_s[-1], side="right"))
    step = max(last // WINDOWS, 1)
    shown = slice(0, last, step)
    busy_s = np.diff(outcomes.busy_s[shown], axis=0)
    mean_s = busy_s.mean(axis=1)
    known = mean_s > 0
    return outcomes.sampled_s[shown][1:][known], busy_s.std(axis=1)[known] / mean_s[known]


def ttft_over_time(outcomes: Outcomes) -> Curve:
    """The mean time to first token of the requests that came in each window, in seconds."""
    served = ~np.isnan(outcomes.ttft_s)
    arrivals_s = outcomes.arrivals_s[served]
    edges = np.linspace(0, outcomes.arrivals_s[-1], WINDOWS + 1)
    count, _ = np.histogram(arrivals_s, edges)
    sums, _ = np.histogram(arrivals_s, edges, weights=outcomes.ttft_s[served])
    known = count > 0
    return edges[1:][known], sums[known] / count[known]
