"""Ranks that are too busy for further requests.

A rank becomes busy when one of its measures exceeds that measure's threshold, and free again when
all of them are below the threshold by the hysteresis; in between its state stays. The load is the
booked one at the time of the decision, so that recovery needs no message. Source of the thresholds:
Dynamo's `KvWorkerMonitor`, which has no hysteresis.
"""

from math import nan
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from router.scheduler._busy_kernel import mark_busy
from router.scheduler.terms import FloatArray

Mask: TypeAlias = npt.NDArray[np.bool_]
Slots: TypeAlias = npt.NDArray[np.int64]


class BusyThresholds(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits above which a rank is busy; None disables one.

    Decode blocks: a fraction of the rank's capacity. Prefill tokens: a number, and a fraction of
    the tokens that its engine computes in one step (`max_num_batched_tokens`).
    """

    active_decode_blocks_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    active_prefill_tokens_threshold: Annotated[int, Meta(ge=0)] | None = None
    active_prefill_tokens_threshold_frac: Annotated[float, Meta(ge=0, le=1e9)] | None = None


NO_THRESHOLDS = BusyThresholds()


def busy_ranks(
    values: FloatArray,
    slots: Slots,
    thresholds: BusyThresholds,
    hysteresis: float,
    *,
    is_latched: bool,
) -> tuple[Mask, int]:
    """Return a mask of the ranks (rows of the rank table) that are busy now, and their number.

    `hysteresis`: the band below each threshold, as a fraction of it, in which a rank keeps its
    state. If `is_latched`, the result becomes that state. O(ranks).
    """
    busy = np.empty(len(slots), np.bool_)
    limits = (
        thresholds.active_decode_blocks_threshold,
        thresholds.active_prefill_tokens_threshold,
        thresholds.active_prefill_tokens_threshold_frac,
    )
    decode, tokens, steps = (nan if each is None else float(each) for each in limits)
    kept = 1.0 - hysteresis
    count = mark_busy(values, slots, decode, tokens, steps, kept, is_latched, busy)
    return busy, count
