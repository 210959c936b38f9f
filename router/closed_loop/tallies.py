"""What the requests behind a suspicion have in common: numbers of fixed size."""

from math import gcd

from router.closed_loop.observation import Observation, Outcome, Shown

_KINDS = 16
"""Different differences that are told apart."""


class Differences:
    """By how many tokens engines count prompts otherwise.

    `step_tokens`: the greatest number of which all differences are multiples, the first aside.
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
        """How many different ones, at most `_KINDS`."""
        return len(self._counts)

    @property
    def usual(self) -> tuple[int, int]:
        """The commonest one, and how often it was seen."""
        return max(self._counts.items(), key=lambda each: each[1], default=(0, 0))

    def note(self, difference_tokens: int, isl_tokens: int) -> None:
        """One more."""
        if self._first is None:
            self._first = difference_tokens
        self.step_tokens = gcd(self.step_tokens, difference_tokens - self._first)
        if difference_tokens in self._counts or self.kinds < _KINDS:
            self._counts[difference_tokens] = self._counts.get(difference_tokens, 0) + 1
        self.sum_tokens += difference_tokens
        self.sum_isl_tokens += isl_tokens


class Tally:
    """Requests that speak for a symptom (`requests`), and as much of the others as is needed.

    `cached_multiple`: what all of their cached tokens are multiples of; `fractions`: how often that
    was no whole number of our blocks; `on_empty`: how often the index showed no block of the rank
    at all; `agreed_*`: requests of which what was predicted was reused.
    """

    __slots__ = (
        "agreed_plain",
        "agreed_salted",
        "block_size",
        "cached_multiple",
        "cached_tokens",
        "differences",
        "fractions",
        "named_by_caller",
        "on_empty",
        "predicted_tokens",
        "requests",
        "salted",
        "unreadable",
    )

    def __init__(self) -> None:
        self.requests = self.salted = self.named_by_caller = 0
        self.block_size = self.cached_tokens = self.predicted_tokens = 0
        self.cached_multiple = self.fractions = self.on_empty = self.unreadable = 0
        self.agreed_salted = self.agreed_plain = 0
        self.differences = Differences()

    def note_for(self, seen: Observation, shown: Shown | None) -> None:
        """A request that speaks for it."""
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
        if shown is not None:
            self.on_empty += not shown.held_blocks
            self.unreadable += shown.is_unreadable

    def note_outcome(self, seen: Observation, outcome: Outcome) -> None:
        """A request, whatever it speaks for."""
        if outcome is Outcome.AGREED:
            self.agreed_salted += seen.is_salted
            self.agreed_plain += not seen.is_salted
