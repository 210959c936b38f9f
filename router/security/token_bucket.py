"""So many requests per second, and so many at once after a pause."""

from math import inf


class TokenBucket:
    """Fills at `rate` per second up to `burst`; every request takes one. A rate of 0 never refuses.

    Invariant: what is in it ≤ burst; below 0 where more was taken at once than there was.
    """

    __slots__ = ("_full_s", "burst", "rate")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate = rate
        self.burst = max(burst, 1.0)
        # Empty requests make no difference to a full bucket: all there is to keep is when it is.
        self._full_s = -inf

    def wait_s(self, now_s: float) -> float:
        """How long until the next request may come; 0: now."""
        if not self.rate:
            return 0.0
        return max(0.0, self._full_s - now_s - (self.burst - 1.0) / self.rate)

    def take(self, now_s: float, requests: int = 1) -> None:
        """So many requests came."""
        if self.rate:
            self._full_s = max(self._full_s, now_s) + requests / self.rate

    def resized(self, rate: float, burst: float) -> "TokenBucket":
        """This bucket where the limits are the same; else a new one, full."""
        same = (self.rate, self.burst) == (rate, max(burst, 1.0))
        return self if same else TokenBucket(rate, burst)
