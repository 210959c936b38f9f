"""How much may be tried again: a share of all requests, so that a fleet in trouble is not asked
twice as much. Pure: time is an argument.
"""

from msgspec import Struct


class BudgetLimits(Struct, frozen=True):
    """Each request earns `share` of a retry, and time `least_per_s`; at most `most` are saved."""

    share: float = 0.2
    least_per_s: float = 5.0
    most: float = 100.0


class RetryBudget:
    """Retries that are left."""

    __slots__ = ("_limits", "_seen_s", "left")

    def __init__(self, limits: BudgetLimits, now_s: float) -> None:
        self._limits = limits
        self._seen_s = now_s
        self.left = limits.most

    def request(self, now_s: float) -> None:
        """A request came."""
        if self.left >= self._limits.most:
            self._seen_s = now_s if now_s > self._seen_s else self._seen_s
        else:
            self._earn(self._limits.share, now_s)

    def take(self, now_s: float) -> bool:
        """Whether one may be tried again; that is then taken."""
        self._earn(0.0, now_s)
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def _earn(self, share: float, now_s: float) -> None:
        earned = share + max(0.0, now_s - self._seen_s) * self._limits.least_per_s
        self._seen_s = max(self._seen_s, now_s)
        self.left = min(self._limits.most, self.left + earned)
