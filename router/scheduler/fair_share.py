"""What each tenant was given of late.

A token given weighs half after every half-life, for all tenants alike, so time passing never
changes their order. Kept are therefore logarithms, log2(Σ tokens · 2^(when / half-life)): nothing
has to be touched as time goes by, nothing overflows, and they can be keys of an order.
"""

from collections.abc import Container
from math import inf, log, log2

HALF_LIFE_S = 10.0

_ROUNDING = 1e-6


class FairShares:
    """Tokens given, by tenant. At most twice `max_tenants` are remembered."""

    __slots__ = ("_all", "_levels", "_max_tenants", "_squares")

    def __init__(self, max_tenants: int = 4096) -> None:
        self._levels: dict[str, float] = {}
        self._all = -inf
        self._squares = -inf
        self._max_tenants = max_tenants

    def level(self, tenant: str) -> float:
        """How much a tenant was given: an order, not a number of tokens."""
        return self._levels.get(tenant, -inf)

    def charge(self, tenant: str, tokens: int, now_s: float) -> None:
        """Note tokens given to a tenant, at least one."""
        given, before = log2(tokens) + now_s / HALF_LIFE_S, self.level(tenant)
        after = self._levels[tenant] = _sum(before, given)
        self._all = _sum(self._all, given)
        self._squares = _sum(self._squares, given + _sum(after, before))

    def is_above(self, tenant: str) -> bool:
        """Was this tenant given more than an equal share? That is Σ share² / Σ share: of n tenants
        that were given the same the n-th part, and nobody alone is above it.
        """
        return self.level(tenant) > self._squares - self._all + _ROUNDING

    def tokens(self, tenant: str, now_s: float) -> float:
        """What a tenant was given weighs so much now."""
        return _weight(self.level(tenant), now_s)

    def tokens_per_s(self, now_s: float) -> float:
        """The rate at which all of them are given tokens, of late."""
        return _weight(self._all, now_s) * log(2) / HALF_LIFE_S

    def forget(self, kept: Container[str]) -> None:
        """Forget those who were given least, once there are too many, except the `kept`.

        They count as new when they come again. Amortised O(log tenants) a tenant.
        """
        if len(self._levels) <= 2 * self._max_tenants:
            return
        by_level = sorted(self._levels, key=lambda tenant: self._levels[tenant])
        for tenant in by_level[: -self._max_tenants]:
            if tenant not in kept:
                del self._levels[tenant]


def _sum(one: float, other: float) -> float:
    """log2(2^one + 2^other)."""
    high, low = max(one, other), min(one, other)
    return high + log2(1.0 + 2.0 ** (low - high))


def _weight(level: float, now_s: float) -> float:
    return float(2.0 ** (level - now_s / HALF_LIFE_S))
