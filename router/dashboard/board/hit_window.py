"""The recent cache hit rate of a rank: predicted by us, and counted by its engine."""

from math import exp

from router.protocol.loads import LoadCounters

WINDOW_S = 60.0
"""The time constant of the exponential decay."""

FEW_TOKENS = 1.0


class HitWindow:
    """Decaying sums of one rank's prompt tokens, and of those that were cached.

    `sent_tokens`: those of prompts sent to the rank. `engine_tokens`: those that its engine
    processed, `cached_tokens` of which it found cached.
    """

    __slots__ = (
        "_as_of_s",
        "_counters",
        "_predicted_tokens",
        "cached_tokens",
        "engine_tokens",
        "sent_tokens",
    )

    def __init__(self, now_s: float) -> None:
        self._as_of_s = now_s
        self._counters: LoadCounters | None = None
        self.sent_tokens = self._predicted_tokens = 0.0
        self.engine_tokens = self.cached_tokens = 0.0

    def note(
        self,
        sent_tokens: int,
        predicted_tokens: int,
        counters: LoadCounters | None,
        now_s: float,
    ) -> None:
        """Add the tokens sent to the rank since the last call, and its engine's counters.

        `predicted_tokens`: those of `sent_tokens` that were predicted to be cached. `counters`:
        None if the engine does not report them.
        """
        fade = exp((self._as_of_s - now_s) / WINDOW_S)
        self._as_of_s = now_s
        computed_tokens, cached_tokens = self._counted(counters)
        self.sent_tokens = self.sent_tokens * fade + sent_tokens
        self._predicted_tokens = self._predicted_tokens * fade + predicted_tokens
        self.engine_tokens = self.engine_tokens * fade + computed_tokens + cached_tokens
        self.cached_tokens = self.cached_tokens * fade + cached_tokens

    @property
    def predicted(self) -> float | None:
        """The fraction predicted to be cached; None if no tokens were sent recently."""
        return fraction(self._predicted_tokens, self.sent_tokens)

    @property
    def actual(self) -> float | None:
        """The fraction that the engine found cached; None without recent tokens or reports."""
        return fraction(self.cached_tokens, self.engine_tokens)

    def _counted(self, counters: LoadCounters | None) -> tuple[int, int]:
        """Return tokens computed and cached since the last counters; after a reset, all of them."""
        before, self._counters = self._counters, counters
        if before is None or counters is None:
            return 0, 0
        computed = counters.prefill_tokens - before.prefill_tokens
        cached = counters.cached_tokens - before.cached_tokens
        if computed < 0 or cached < 0:
            return counters.prefill_tokens, counters.cached_tokens
        return computed, cached


def fraction(part: float, whole: float) -> float | None:
    """Return the fraction, rounded to three places so that equal displays compare equal.

    Returns None if the whole is below `FEW_TOKENS`.
    """
    return None if whole < FEW_TOKENS else round(min(part / whole, 1.0), 3)
