"""Tokens given to tenants of late, and to the users and sessions within each.

A level is the logarithm of tokens that grow with time instead of fading, so that it orders at any
time what was given until then.
"""

from collections.abc import Container, Iterable
from math import inf, log, log2

HALF_LIFE_S = 10.0

_ROUNDING = 1e-6


class FairShares:
    """Tokens given, by tenant; at most twice `max_tenants` are kept."""

    __slots__ = ("_all", "_levels", "_max_tenants", "_squares")

    def __init__(self, max_tenants: int = 4096) -> None:
        self._levels: dict[str, float] = {}
        self._all = -inf
        self._squares = -inf
        self._max_tenants = max_tenants

    def level(self, tenant: str) -> float:
        """Return a tenant's level: a sort key, not a number of tokens."""
        return self._levels.get(tenant, -inf)

    def charge(self, tenant: str, tokens: int, now_s: float) -> None:
        """Record tokens given to a tenant, at least one."""
        given, before = log2(tokens) + now_s / HALF_LIFE_S, self.level(tenant)
        after = self._levels[tenant] = _sum(before, given)
        self._all = _sum(self._all, given)
        self._squares = _sum(self._squares, given + _sum(after, before))

    def is_above(self, tenant: str) -> bool:
        """Return whether this tenant was given more than an equal share.

        The equal share is Σ share² / Σ share: 1 / n for n tenants with equal amounts. A single
        tenant is never above it.
        """
        return self.level(tenant) > self._squares - self._all + _ROUNDING

    def tokens(self, tenant: str, now_s: float) -> float:
        """Return the present weight of the tokens given to a tenant."""
        return _weight(self.level(tenant), now_s)

    def tokens_per_s(self, now_s: float) -> float:
        """Return the recent rate at which all tenants are given tokens."""
        return _weight(self._all, now_s) * log(2) / HALF_LIFE_S

    def forget(self, kept: Container[str]) -> list[str]:
        """Drop the tenants with the lowest levels if there are too many, except the `kept`.

        Returns those dropped, which count as new when they return. Amortised O(log tenants) per
        tenant.
        """
        if len(self._levels) <= 2 * self._max_tenants:
            return []
        by_level = sorted(self._levels, key=lambda tenant: self._levels[tenant])
        dropped = [tenant for tenant in by_level[: -self._max_tenants] if tenant not in kept]
        for tenant in dropped:
            del self._levels[tenant]
        return dropped


MOST_IDS = 1024
"""Limit of the fair share ids of a tenant whose tokens are remembered; beyond twice this, those
with the least are dropped. Callers choose ids, and each tenant has a limit of its own, so that none
makes the router forget what another's ids were given."""


class SharesWithin:
    """Tokens given, by fair share id within each tenant; empty ids count as one.

    Tenants that never sent an id are not recorded.
    """

    __slots__ = ("_by_tenant",)

    def __init__(self) -> None:
        self._by_tenant: dict[str, FairShares] = {}

    def level(self, tenant: str, fair_share_id: str) -> float:
        """Return the level of an id among those of its tenant: a sort key."""
        shares = self._by_tenant.get(tenant)
        return -inf if shares is None else shares.level(fair_share_id)

    def charge(
        self, tenant: str, fair_share_id: str, tokens: int, now_s: float, kept: Container[str]
    ) -> None:
        """Record tokens given under an id; the levels of `kept` are not dropped."""
        shares = self._by_tenant.get(tenant)
        if shares is None:
            if not fair_share_id:
                return
            shares = self._by_tenant[tenant] = FairShares(MOST_IDS)
        shares.charge(fair_share_id, tokens, now_s)
        shares.forget(kept)

    def drop(self, tenants: Iterable[str]) -> None:
        """Forget the ids of these tenants."""
        for tenant in tenants:
            self._by_tenant.pop(tenant, None)


def _sum(one: float, other: float) -> float:
    """Return log2(2^one + 2^other)."""
    low, high = (one, other) if one < other else (other, one)
    return high + log2(1.0 + 2.0 ** (low - high))


def _weight(level: float, now_s: float) -> float:
    return float(2.0 ** (level - now_s / HALF_LIFE_S))
