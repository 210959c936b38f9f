"""Statistics of the requests that support a symptom, of fixed size."""

from math import gcd

from router.accuracy.observation import AccuracyOutcome, Observation, Shown

_KINDS = 16
"""The limit of distinct differences that are counted."""


class Differences:
    """Differences between the engines' prompt lengths and ours, in tokens.

    `step_tokens`: the greatest common divisor of all differences from the first one.
    """

    __slots__ = ("_counts", "_first", "step_tokens", "sum_isl_tokens", "sum_tokens")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._first: int | None = None
        self.step_tokens = 0
        self.sum_tokens = 0
        self.sum_isl_tokens = 0

    @property
    def kinds(self) -> int:
        """The number of distinct differences, at most `_KINDS`."""
        return len(self._counts)

    @property
    def usual(self) -> tuple[int, int]:
        """The most frequent difference, and its count."""
        return max(self._counts.items(), key=lambda each: each[1], default=(0, 0))

    def note(self, difference_tokens: int, isl_tokens: int) -> None:
        """Add a difference."""
        if self._first is None:
            self._first = difference_tokens
        self.step_tokens = gcd(self.step_tokens, difference_tokens - self._first)
        if difference_tokens in self._counts or self.kinds < _KINDS:
            self._counts[difference_tokens] = self._counts.get(difference_tokens, 0) + 1
        self.sum_tokens += difference_tokens
        self.sum_isl_tokens += isl_tokens


class DifferenceTotals:
    """The requests that support a symptom (`requests`), with a few numbers about the others.

    `cached_multiple`: the greatest common divisor of their cached tokens; `fractions`: requests
    with a cached part that is no whole number of our blocks; `on_empty`: requests for which the
    index had no block of the rank; `agreed_*`: requests with a correct prediction. `shortfalls`:
    the tokens by which less was reused than predicted. `hybrid`: those of hybrid models;
    `held_in_full`: of these, the ones whose reused part was all held by full attention.
    """

    __slots__ = (
        "agreed_plain",
        "agreed_salted",
        "block_size",
        "cached_multiple",
        "cached_tokens",
        "differences",
        "fractions",
        "held_in_full",
        "hybrid",
        "named_by_caller",
        "on_empty",
        "predicted_tokens",
        "requests",
        "salted",
        "shortfalls",
        "unreadable",
    )

    def __init__(self) -> None:
        self.requests = self.salted = self.named_by_caller = 0
        self.block_size = self.cached_tokens = self.predicted_tokens = 0
        self.cached_multiple = self.fractions = self.on_empty = self.unreadable = 0
        self.agreed_salted = self.agreed_plain = self.hybrid = self.held_in_full = 0
        self.differences = Differences()
        self.shortfalls = Differences()

    def note_for(self, seen: Observation, shown: Shown | None) -> None:
        """Add a request that supports the symptom."""
        self.requests += 1
        self.salted += seen.is_salted
        self.named_by_caller += seen.is_named_by_caller
        self.block_size = seen.block_size
        self.cached_tokens += seen.cached_tokens or 0
        self.predicted_tokens += seen.predicted_tokens
        self.cached_multiple = gcd(self.cached_multiple, seen.cached_tokens or 0)
        self.fractions += seen.is_fraction
        if seen.difference_tokens:
            self.differences.note(seen.difference_tokens, seen.isl_tokens)
        self.hybrid += seen.is_hybrid
        if seen.predicted_tokens:
            self.shortfalls.note(seen.predicted_tokens - (seen.cached_tokens or 0), seen.isl_tokens)
        if shown is not None:
            self.held_in_full += 0 < (seen.cached_tokens or 0) <= shown.full_tokens
            self.on_empty += not shown.held_blocks
            self.unreadable += shown.is_unreadable

    def note_outcome(self, seen: Observation, outcome: AccuracyOutcome) -> None:
        """Add the outcome of any request of the group."""
        if outcome is AccuracyOutcome.AGREED:
            self.agreed_salted += seen.is_salted
            self.agreed_plain += not seen.is_salted
