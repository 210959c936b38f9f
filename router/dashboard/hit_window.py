"""How much of a rank's prompts is cached: predicted, and as its engine counts; of late."""

from math import exp

from router.protocol.loads import LoadCounters

WINDOW_S = 60.0
"""What is so old counts for 1 / e."""

FEW_TOKENS = 1.0


class HitWindow:
    """Fading sums of one rank's prompt tokens, and of those that were cached."""

    __slots__ = (
        "_as_of_s",
        "_cached_tokens",
        "_counters",
        "_engine_tokens",
        "_predicted_tokens",
        "_sent_tokens",
    )

    def __init__(self, now_s: float) -> None:
        self._as_of_s = now_s
        self._counters: LoadCounters | None = None
        self._sent_tokens = self._predicted_tokens = 0.0
        self._engine_tokens = self._cached_tokens = 0.0

    def note(
        self,
        sent_tokens: int,
        predicted_tokens: int,
        counters: LoadCounters | None,
        now_s: float,
    ) -> None:
        """We sent so many tokens there, of which we predicted so many to be cached; its engine's
        counters stand so, null where it does not report.
        """
        fade = exp((self._as_of_s - now_s) / WINDOW_S)
        self._as_of_s = now_s
        computed_tokens, cached_tokens = self._counted(counters)
        self._sent_tokens = self._sent_tokens * fade + sent_tokens
        self._predicted_tokens = self._predicted_tokens * fade + predicted_tokens
        self._engine_tokens = self._engine_tokens * fade + computed_tokens + cached_tokens
        self._cached_tokens = self._cached_tokens * fade + cached_tokens

    @property
    def sums(self) -> tuple[float, float, float, float]:
        """Tokens sent, of those predicted cached; tokens of its engine, of those cached."""
        return (
            self._sent_tokens,
            self._predicted_tokens,
            self._engine_tokens,
            self._cached_tokens,
        )

    @property
    def predicted(self) -> float | None:
        """The fraction that we predicted; None: nothing was sent of late."""
        return fraction(self._predicted_tokens, self._sent_tokens)

    @property
    def actual(self) -> float | None:
        """The fraction that its engine found; None: it computed nothing of late, or is silent."""
        return fraction(self._cached_tokens, self._engine_tokens)

    def _counted(self, counters: LoadCounters | None) -> tuple[int, int]:
        """Computed and cached since the last counters; a new life begins with what it has."""
        before, self._counters = self._counters, counters
        if before is None or counters is None:
            return 0, 0
        computed = counters.prefill_tokens - before.prefill_tokens
        cached = counters.cached_tokens - before.cached_tokens
        if computed < 0 or cached < 0:
            return counters.prefill_tokens, counters.cached_tokens
        return computed, cached


def fraction(part: float, whole: float) -> float | None:
    """None where there is no whole. To three places: what looks the same is the same."""
    return None if whole < FEW_TOKENS else round(min(part / whole, 1.0), 3)
