"""One request, predicted and served, and what the two say of each other.

cached, predicted ─▶ about the same             AGREED
                     less                       LESS, UNUSED (nothing), TIERS_UNUSED
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
    """What was expected of a prompt, and what its engine said of it.

    `device_tokens` of the `predicted_tokens` lay on the device; others were busy with
    `in_flight_tokens` of its beginning. `cached_tokens`: None where the engine does not say. Flags
    as in `Expectation`.
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

    @property
    def difference_tokens(self) -> int:
        """By how many tokens the engine's prompt is longer than ours."""
        return 0 if self.has_objects else self.prompt_tokens - self.isl_tokens

    @property
    def is_fraction(self) -> bool:
        """Is what was cached no whole number of our blocks, nor all that can be?"""
        cached_tokens = self.cached_tokens or 0
        return cached_tokens % self.block_size != 0 and cached_tokens < self.prompt_tokens - 1


class Shown(Struct, frozen=True, gc=False):
    """What the index shows afterwards: how much of the prompt its rank holds, and how much at all.

    `as_of_s`: the moment as of which that is all there was, -inf where nobody can tell;
    `is_unreadable`: events of the engine could not be read.
    """

    shown_tokens: int
    held_blocks: int
    as_of_s: float
    is_unreadable: bool = False


class Outcome(enum.IntEnum):
    """What a request says of the prediction."""

    QUIET = enum.auto()
    AGREED = enum.auto()
    LESS = enum.auto()
    SHARED = enum.auto()
    MORE = enum.auto()
    LATE = enum.auto()
    UNSHOWN = enum.auto()
    UNUSED = enum.auto()
    TIERS_UNUSED = enum.auto()


def is_surplus(seen: Observation) -> bool:
    """Was a block or more cached than predicted? Then what it says depends on what is shown."""
    cached_tokens = seen.cached_tokens
    return cached_tokens is not None and cached_tokens - seen.predicted_tokens >= seen.block_size


def shows(seen: Observation, shown: Shown) -> bool:
    """Does the index by now show what was cached?"""
    return shown.shown_tokens + seen.block_size > (seen.cached_tokens or 0)


def surplus_outcome(seen: Observation) -> Outcome:
    """Of a surplus that was shown as soon as it was told of."""
    explained_tokens = seen.in_flight_tokens + seen.block_size
    return Outcome.SHARED if (seen.cached_tokens or 0) < explained_tokens else Outcome.MORE


def outcome_of(seen: Observation) -> Outcome:
    """Of what is no surplus. What others were busy with may not have been computed yet."""
    cached_tokens, predicted_tokens = seen.cached_tokens, seen.predicted_tokens
    if cached_tokens is None or not predicted_tokens:
        return Outcome.QUIET
    if predicted_tokens - cached_tokens < seen.block_size:
        return Outcome.AGREED
    if not cached_tokens:
        return Outcome.QUIET if seen.in_flight_tokens else Outcome.UNUSED
    if cached_tokens <= seen.device_tokens < predicted_tokens:
        return Outcome.TIERS_UNUSED
    return Outcome.LESS
