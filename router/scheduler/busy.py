"""Ranks that are too busy to be sent anything more.

A rank becomes busy when one of its measures exceeds that measure's threshold, and is free again
once all of them are below the threshold by the hysteresis: in between it stays what it is. It is
judged by what is booked at the moment of the decision, so that no message has to come for it to
recover. Source of the thresholds: Dynamo's `KvWorkerMonitor`, which has no band.
"""

from math import nan
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from router.scheduler._busy_kernel import UNKNOWN_STEP_TOKENS, mark_busy
from router.scheduler.terms import FloatArray

Mask: TypeAlias = npt.NDArray[np.bool_]
Slots: TypeAlias = npt.NDArray[np.int64]


class BusyThresholds(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Above what a rank is busy; None: this is not looked at.

    Of decode blocks a fraction of the rank's capacity; of prefill tokens a number, and a fraction
    of what its engine computes in one step (`max_num_batched_tokens`).
    """

    active_decode_blocks_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    active_prefill_tokens_threshold: Annotated[int, Meta(ge=0)] | None = None
    active_prefill_tokens_threshold_frac: Annotated[float, Meta(ge=0, le=1e9)] | None = None

    @property
    def are_set(self) -> bool:
        """Whether anything is looked at."""
        return self != NO_THRESHOLDS


NO_THRESHOLDS = BusyThresholds()


def busy_ranks(
    values: FloatArray,
    slots: Slots,
    thresholds: BusyThresholds,
    hysteresis: float,
    *,
    is_latched: bool,
) -> tuple[Mask, int]:
    """Who of the ranks in these rows of the rank table is busy now, and how many are.

    `hysteresis`: the band below each threshold, as a fraction of it, where a rank stays what it
    was; latched, it is what it is found to be from now on. O(ranks).
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


def step_tokens(max_batched_tokens: FloatArray) -> FloatArray:
    """What engines compute in one step, at most."""
    return np.where(max_batched_tokens > 0, max_batched_tokens, UNKNOWN_STEP_TOKENS)
