"""A retry budget: retries are limited to a share of all requests.

It keeps a fleet in trouble from receiving twice the load. Pure: time is an argument.
"""

from msgspec import Struct


class BudgetLimits(Struct, frozen=True):
    """A request earns `share` of a retry, a second `least_per_s`; at most `most` are saved."""

    share: float = 0.2
    least_per_s: float = 5.0
    most: float = 100.0


class RetryBudget:
    """The retries that are left."""

    __slots__ = ("_limits", "_seen_s", "left")

    def __init__(self, limits: BudgetLimits, now_s: float) -> None:
        self._limits = limits
        self._seen_s = now_s
        self.left = limits.most

    def request(self, now_s: float) -> None:
        """Count a request."""
        if self.left >= self._limits.most:
            self._seen_s = now_s if now_s > self._seen_s else self._seen_s
        else:
            self._earn(self._limits.share, now_s)

    def take(self, now_s: float) -> bool:
        """Take a retry. Returns False if none is left."""
        self._earn(0.0, now_s)
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def _earn(self, share: float, now_s: float) -> None:
        earned = share + max(0.0, now_s - self._seen_s) * self._limits.least_per_s
        self._seen_s = max(self._seen_s, now_s)
        self.left = min(self._limits.most, self.left + earned)
