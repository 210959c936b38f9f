"""The comparison of one request's usage with its prediction.

cached, predicted ─▶ about the same             AGREED
                     less                       LESS, UNUSED (nothing), TIERS_UNUSED,
                                                EARLIER (one block, or of a hybrid model)
                     more ─ does the index show it by now?
                            no, not even later              UNSHOWN
                            no, but later: events are slow  LATE
                            yes, others were busy with it   SHARED
                            yes                             MORE
"""

import enum

from msgspec import Struct

from router.protocol.values import Scope


class Observation(Struct, frozen=True, gc=False):
    """The prediction for a prompt, and its engine's usage report.

    `device_tokens` of the `predicted_tokens` were on the device. `in_flight_tokens`: leading tokens
    that other requests on the rank were using. `cached_tokens`: None if the engine does not report
    them. `is_hybrid`: the rank has a layout of a hybrid model, without a known problem. The other
    flags are those of `ExpectedUsage`.
    """

    worker_id: int
    scope: Scope
    tenant: str | None
    block_size: int
    isl_tokens: int
    device_tokens: int
    predicted_tokens: int
    in_flight_tokens: int
    prompt_tokens: int
    cached_tokens: int | None
    is_salted: bool = False
    is_named_by_caller: bool = False
    has_objects: bool = False
    is_hybrid: bool = False

    @property
    def difference_tokens(self) -> int:
        """Tokens by which the engine's prompt is longer than ours; 0 with multimodal objects."""
        return 0 if self.has_objects else self.prompt_tokens - self.isl_tokens

    @property
    def is_fraction(self) -> bool:
        """True if the cached part is no whole number of our blocks, nor all that can be cached."""
        cached_tokens = self.cached_tokens or 0
        return cached_tokens % self.block_size != 0 and cached_tokens < self.prompt_tokens - 1


class Shown(Struct, frozen=True, gc=False):
    """The index's state afterwards: the cached part of the prompt, and all blocks of the rank.

    `fresh_at_s`: the time at which the index was known to be complete, -inf if unknown;
    `is_unreadable`: events of the engine could not be read. `full_tokens`: the part that full
    attention holds, of a hybrid rank.
    """

    shown_tokens: int
    held_blocks: int
    fresh_at_s: float
    is_unreadable: bool = False
    full_tokens: int = 0


class AccuracyOutcome(enum.IntEnum):
    """The outcome of the comparison."""

    QUIET = enum.auto()
    AGREED = enum.auto()
    LESS = enum.auto()
    SHARED = enum.auto()
    MORE = enum.auto()
    LATE = enum.auto()
    UNSHOWN = enum.auto()
    UNUSED = enum.auto()
    TIERS_UNUSED = enum.auto()
    EARLIER = enum.auto()


def is_surplus(seen: Observation) -> bool:
    """Return whether at least one block more was cached than predicted.

    If so, the outcome depends on what the index shows.
    """
    cached_tokens = seen.cached_tokens
    return cached_tokens is not None and cached_tokens - seen.predicted_tokens >= seen.block_size


def shows(seen: Observation, shown: Shown) -> bool:
    """Return whether the index now shows the cached blocks."""
    return shown.shown_tokens + seen.block_size > (seen.cached_tokens or 0)


def surplus_outcome(seen: Observation) -> AccuracyOutcome:
    """Return the outcome of a surplus that the index showed at the time of the report."""
    explained_tokens = seen.in_flight_tokens + seen.block_size
    return (
        AccuracyOutcome.SHARED
        if (seen.cached_tokens or 0) < explained_tokens
        else AccuracyOutcome.MORE
    )


def outcome_of(seen: Observation) -> AccuracyOutcome:
    """Return the outcome without a surplus.

    Blocks that other requests were using may not have been computed yet.
    """
    cached_tokens, predicted_tokens = seen.cached_tokens, seen.predicted_tokens
    if cached_tokens is None or not predicted_tokens:
        return AccuracyOutcome.QUIET
    if predicted_tokens - cached_tokens < seen.block_size:
        return AccuracyOutcome.AGREED
    if not cached_tokens:
        return AccuracyOutcome.QUIET if seen.in_flight_tokens else AccuracyOutcome.UNUSED
    if cached_tokens <= seen.device_tokens < predicted_tokens:
        return AccuracyOutcome.TIERS_UNUSED
    is_one_block = predicted_tokens - cached_tokens < 2 * seen.block_size
    return AccuracyOutcome.EARLIER if seen.is_hybrid or is_one_block else AccuracyOutcome.LESS
