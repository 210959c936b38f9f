"""The totals of a replay: counts, sums, and the most notable differences."""

from heapq import nlargest

from msgspec import Struct

from router.core.commands import Reserve
from router.recording.replay import Compared
from router.scheduler.terms import Terms

TOLD = 5
"""The limit of differences that are printed in full."""


class Totals(Struct):
    """Sums over the decisions that chose a rank both times."""

    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0

    def add(self, terms: Terms) -> None:
        """Add the terms of the chosen rank."""
        self.cached_tokens += cached_tokens(terms)
        self.prefill_tokens += terms.potential_prefill_tokens
        self.decode_blocks += terms.potential_decode_blocks


class Tally:
    """Counts of decisions, and of choices, in which the core selected the rank.

    `unproven`: decisions not compared, since the state differs after a hole. `first`: the first
    differences of any kind. `largest`: the largest differences in rank, by tokens.
    """

    def __init__(self) -> None:
        self.decisions = self.equal = self.choices = self.moved = self.unproven = 0
        self.first: list[Compared] = []
        self.largest: list[Compared] = []
        self.recorded, self.now = Totals(), Totals()

    def add(self, compared: Compared, *, is_behind_hole: bool) -> None:
        """Count a decision."""
        if is_behind_hole:
            self.unproven += 1
            return
        self.decisions += 1
        self.equal += compared.is_equal
        if not compared.is_equal and len(self.first) < TOLD:
            self.first.append(compared)
        if not isinstance(compared.recorded.command, Reserve):
            self._add_choice(compared)

    def _add_choice(self, compared: Compared) -> None:
        self.choices += 1
        before, after = compared.recorded.outcome, compared.now.outcome
        if before.terms is not None and after.terms is not None:
            self.recorded.add(before.terms)
            self.now.add(after.terms)
        if before.rank != after.rank:
            self.moved += 1
            self.largest = nlargest(TOLD, [*self.largest, compared], key=weight_tokens)


def cached_tokens(terms: Terms) -> int:
    """Return the tokens of the prompt that the engine was predicted to reuse."""
    return terms.predicted_cached_blocks * terms.block_size


def weight_tokens(compared: Compared) -> int:
    """Return the difference of a decision in tokens, cached or to be prefilled."""
    before, after = compared.recorded.outcome.terms, compared.now.outcome.terms
    if before is None or after is None:
        return 0
    cached = abs(cached_tokens(after) - cached_tokens(before))
    return max(cached, abs(after.potential_prefill_tokens - before.potential_prefill_tokens))
