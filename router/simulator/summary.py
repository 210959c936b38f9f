"""The numbers that one run is judged by."""

import numpy as np
from msgspec import Struct

from router.simulator.outcomes import FloatArray, Outcomes


class Summary(Struct, frozen=True, kw_only=True):
    """Of requests that were served; their times in seconds.

    `hit_rate`: cached prompt tokens of all prompt tokens. `load_spread`: the coefficient of
    variation (standard deviation by mean) of the workers' busy seconds.
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


def summarize(outcomes: Outcomes) -> Summary:
    """The summary of a run. O(requests)."""
    served = ~np.isnan(outcomes.e2e_s)
    ttft_s, e2e_s = outcomes.ttft_s[served], outcomes.e2e_s[served]
    tpot_s = outcomes.tpot_s[served & ~np.isnan(outcomes.tpot_s)]
    prompt_tokens = float(outcomes.isl_tokens[served].sum())
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
    )


def spread(values: FloatArray) -> float:
    """Standard deviation by mean; 0 where there is nothing to spread."""
    mean = float(values.mean())
    return float(values.std()) / mean if mean else 0.0


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _percentile(values: FloatArray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")
