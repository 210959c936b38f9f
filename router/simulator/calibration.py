"""Engine constants from reported counters, fitted by least squares.

busy_s = base · steps + prefill_token · prefill tokens + attention_token² · Σ c (x + c / 2)
         + decode_request · Σ decoding requests + decode_kv_token · Σ their resident tokens
"""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from router.protocol.loads import LoadCounters
from router.simulator.engine_model import EngineModel
from router.simulator.outcomes import FloatArray

CONSTANTS = (
    "base_s",
    "prefill_token_s",
    "attention_token2_s",
    "decode_request_s",
    "decode_kv_token_s",
)
_COUNTED = (
    "steps",
    "prefill_tokens",
    "prefill_token_contexts",
    "decode_requests",
    "resident_kv_tokens",
)


def calibrated(
    lives: Iterable[list[LoadCounters]], prior: EngineModel, chunk_tokens: int, capacity_tokens: int
) -> EngineModel:
    """Return the non-negative constants that explain the busy seconds best.

    Returns the constants of `prior` if too little is reported.

    `lives`: the counters of each incarnation of each engine, in order. O(reports).
    """
    rows = [row for counters in lives for row in _differences(counters)]
    values = {name: getattr(prior, name) for name in CONSTANTS}
    if len(rows) >= len(CONSTANTS):
        table = np.array(rows)
        fitted = _least_squares(table[:, 1:], table[:, 0])
        if fitted[0] > 0:
            values = dict(zip(CONSTANTS, map(float, fitted), strict=True))
    return EngineModel(chunk_tokens=chunk_tokens, capacity_tokens=capacity_tokens, **values)


def _differences(counters: list[LoadCounters]) -> list[list[float]]:
    """Return busy seconds and terms between consecutive reports, where any step was done."""
    rows = []
    for before, after in pairwise(counters):
        busy_s = after.busy_s - before.busy_s
        if busy_s > 0 and after.steps > before.steps:
            terms = [float(getattr(after, name) - getattr(before, name)) for name in _COUNTED]
            rows.append([busy_s, *terms])
    return rows


def _least_squares(terms: FloatArray, busy_s: FloatArray) -> FloatArray:
    """Return non-negative coefficients: the most negative one is fixed at 0 until none is negative.

    Rows are divided by their busy seconds, so that errors are relative, and columns are scaled to a
    common size.
    """
    weighted = terms / busy_s[:, None]
    scale = np.abs(weighted).max(axis=0)
    used = scale > 0
    fitted = np.zeros(terms.shape[1])
    while used.any():
        solution, *_ = np.linalg.lstsq(weighted[:, used] / scale[used], np.ones(len(terms)))
        if solution.min() >= 0:
            fitted[used] = solution / scale[used]
            break
        used[np.flatnonzero(used)[solution.argmin()]] = False
    return fitted
