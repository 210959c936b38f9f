"""Ranks that are too busy to be sent anything more.

A rank becomes busy when one of its measures exceeds that measure's threshold, and is free again
once all of them are below the threshold by the hysteresis: in between it stays what it is. It is
judged by what is booked at the moment of the decision, so that no message has to come for it to
recover. Source of the thresholds: Dynamo's `KvWorkerMonitor`, which has no band.
"""

from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from router.scheduler.terms import FloatArray

Mask: TypeAlias = npt.NDArray[np.bool_]


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


class Busyness(Struct, frozen=True, eq=False):
    """How busy ranks are, one element each."""

    decode_blocks: FloatArray
    capacity_blocks: FloatArray
    prefill_tokens: FloatArray
    max_batched_tokens: FloatArray

    def exceeds(self, thresholds: BusyThresholds, scale: float) -> Mask:
        """Where a measure is above `scale` times its threshold."""
        above = np.zeros(len(self.decode_blocks), np.bool_)
        fraction = thresholds.active_decode_blocks_threshold
        if fraction is not None:
            above |= self.decode_blocks > scale * fraction * self.capacity_blocks
        tokens = thresholds.active_prefill_tokens_threshold
        if tokens is not None:
            above |= self.prefill_tokens > scale * tokens
        steps = thresholds.active_prefill_tokens_threshold_frac
        if steps is not None:
            above |= self.prefill_tokens > scale * steps * self.max_batched_tokens
        return above


def step_tokens(max_batched_tokens: FloatArray) -> FloatArray:
    """What engines compute in one step, at most; a great deal where nobody knows (0), as Dynamo
    has it.
    """
    return np.where(max_batched_tokens > 0, max_batched_tokens, 10_000_000.0)


def capacity(capacity_blocks: FloatArray) -> FloatArray:
    """Blocks of ranks; more than there are anywhere where nobody knows (0)."""
    return np.where(capacity_blocks > 0, capacity_blocks, 1e18)


def busy_ranks(
    now: Busyness, was_busy: Mask, thresholds: BusyThresholds, hysteresis: float
) -> Mask:
    """Who is busy now. `hysteresis`: the band below each threshold, as a fraction of it."""
    stays: Mask = was_busy & now.exceeds(thresholds, 1.0 - hysteresis)
    return now.exceeds(thresholds, 1.0) | stays
