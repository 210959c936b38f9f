"""The queue of one policy class.

    lane ── requests that the same ranks can take: one head, placeable or not
     └─ tenant ── by strict priority, then by least tokens given recently
         └─ requests, by strict priority, then in the order of the class

A request that only one rank can take therefore does not delay the others, and a tenant that submits
ten times its share waits ten times as long, while the other tenants hardly notice.
"""

from collections.abc import Callable, Container, Hashable
from math import inf, log, log2
from typing import Literal, TypeAlias

from msgspec import Struct
from sortedcontainers import SortedList

from router.scheduler.queue.policy_classes import PolicyClass

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

    def forget(self, kept: Container[str]) -> None:
        """Drop the tenants with the lowest levels if there are too many, except the `kept`.

        A dropped tenant counts as new when it returns. Amortised O(log tenants) per tenant.
        """
        if len(self._levels) <= 2 * self._max_tenants:
            return
        by_level = sorted(self._levels, key=lambda tenant: self._levels[tenant])
        for tenant in by_level[: -self._max_tenants]:
            if tenant not in kept:
                del self._levels[tenant]


def _sum(one: float, other: float) -> float:
    """Return log2(2^one + 2^other)."""
    low, high = (one, other) if one < other else (other, one)
    return high + log2(1.0 + 2.0 ** (low - high))


def _weight(level: float, now_s: float) -> float:
    return float(2.0 ** (level - now_s / HALF_LIFE_S))


LimitKind: TypeAlias = Literal["requests", "isl_tokens", "cached_tokens"]


class Waiting(Struct, frozen=True, kw_only=True):
    """A waiting request.

    `ticket` grows with arrival. Requests of one `lane` can be sent to the same ranks. `order` is
    the rank among those of the tenant, the lowest first. `cached_tokens`, and with it the cost to
    class and tenant, is fixed at arrival.
    """

    ticket: int
    tenant: str = ""
    lane: Hashable = None
    strict_priority: int = 0
    order: float
    isl_tokens: int
    cached_tokens: int = 0
    since_s: float = 0.0
    expires_s: float

    @property
    def cost_tokens(self) -> int:
        """The number of uncached tokens, at least one."""
        return max(1, self.isl_tokens - self.cached_tokens)

    @property
    def position(self) -> tuple[int, float, int]:
        """The sort key among the requests of its tenant and lane."""
        return (-self.strict_priority, self.order, self.ticket)


IsFree: TypeAlias = Callable[[Waiting, PolicyClass, float], bool]
"""Returns whether a request can be placed now, at a fraction of its class's busy threshold. The
result is the same for all requests of a lane.
"""

ABOVE_SHARE = 0.5
"""Fraction of the busy threshold for tenants above their share; the rest is for the others."""


class Usage:
    """Totals of waiting requests."""

    __slots__ = ("cached_tokens", "cost_tokens", "isl_tokens", "requests")

    def __init__(self) -> None:
        self.requests = self.isl_tokens = self.cached_tokens = self.cost_tokens = 0

    def add(self, waiting: Waiting, sign: int = 1) -> None:
        """Add a request to the totals, or subtract it."""
        self.requests += sign
        self.isl_tokens += sign * waiting.isl_tokens
        self.cached_tokens += sign * waiting.cached_tokens
        self.cost_tokens += sign * waiting.cost_tokens

    def of(self, kind: LimitKind) -> int:
        """Return the total that a limit of this kind applies to."""
        value: int = getattr(self, kind)
        return value


class _Flow:
    """Requests of one tenant in one lane; `shown` is the key of the first one in the lane."""

    __slots__ = ("positions", "shown")

    def __init__(self) -> None:
        self.positions: SortedList = SortedList()
        self.shown: tuple[int, float, float, int] | None = None


class ClassQueue:
    """One class's requests, its credit (`deficit_tokens`), and the tokens given to its tenants.

    Invariants: a ticket is in one flow; each lane has every flow of it once, under the key of its
    first request and its tenant's level; usage is the sum over requests.
    """

    __slots__ = (
        "_by_ticket",
        "_flows",
        "_lanes",
        "_tenant_usage",
        "deficit_tokens",
        "settings",
        "shares",
        "usage",
    )

    def __init__(self, settings: PolicyClass) -> None:
        self.settings = settings
        self.deficit_tokens = 0
        self.usage = Usage()
        self.shares = FairShares()
        self._by_ticket: dict[int, Waiting] = {}
        self._flows: dict[str, dict[Hashable, _Flow]] = {}
        self._lanes: dict[Hashable, SortedList] = {}
        self._tenant_usage: dict[str, Usage] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._by_ticket

    @property
    def tenants(self) -> int:
        """The number of tenants with waiting requests."""
        return len(self._flows)

    def tenant_usage(self, tenant: str) -> Usage:
        """Return the totals of a tenant's waiting requests."""
        return self._tenant_usage.get(tenant) or Usage()

    def push(self, waiting: Waiting) -> None:
        """Add a request. O(log requests)."""
        self._by_ticket[waiting.ticket] = waiting
        flow = self._flows.setdefault(waiting.tenant, {}).setdefault(waiting.lane, _Flow())
        flow.positions.add(waiting.position)
        self.usage.add(waiting)
        self._tenant_usage.setdefault(waiting.tenant, Usage()).add(waiting)
        self._show(waiting.tenant, waiting.lane)

    def remove(self, ticket: int) -> Waiting:
        """Remove a request and return it. O(log requests)."""
        waiting = self._by_ticket.pop(ticket)
        self._flows[waiting.tenant][waiting.lane].positions.remove(waiting.position)
        self.usage.add(waiting, -1)
        self._tenant_usage[waiting.tenant].add(waiting, -1)
        self._show(waiting.tenant, waiting.lane)
        return waiting

    def first(self, is_free: IsFree) -> Waiting | None:
        """Return the next request that can be placed; None if none can. O(lanes · log lanes)."""
        for *_, ticket in sorted(lane[0] for lane in self._lanes.values()):
            waiting = self._by_ticket[ticket]
            part = ABOVE_SHARE if self.shares.is_above(waiting.tenant) else 1.0
            if is_free(waiting, self.settings, part):
                return waiting
        return None

    def charge(self, tenant: str, cost_tokens: int, now_s: float) -> None:
        """Charge a tenant for tokens given to it by this class."""
        self.shares.charge(tenant, cost_tokens, now_s)
        self.shares.forget(kept=self._flows)
        for lane in tuple(self._flows.get(tenant, ())):
            self._show(tenant, lane)

    def last_of_heaviest(self, kind: LimitKind) -> Waiting:
        """Return the last request, in order, of the tenant with the highest total of a kind.

        O(tenants + lanes).
        """
        tenant = max(self._tenant_usage, key=lambda each: self._tenant_usage[each].of(kind))
        flows = self._flows[tenant].values()
        return self._by_ticket[max(flow.positions[-1] for flow in flows)[-1]]

    def _show(self, tenant: str, lane: Hashable) -> None:
        """Update the position of a flow in its lane, and remove empty entries."""
        flow = self._flows[tenant][lane]
        heads = self._lanes.setdefault(lane, SortedList())
        if flow.shown is not None:
            heads.remove(flow.shown)
        if flow.positions:
            priority, order, ticket = flow.positions[0]
            flow.shown = (priority, self.shares.level(tenant), order, ticket)
            heads.add(flow.shown)
            return
        del self._flows[tenant][lane]
        if not self._flows[tenant]:
            del self._flows[tenant], self._tenant_usage[tenant]
        if not heads:
            del self._lanes[lane]

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(size of the queue)."""
        in_flows = []
        for tenant, lanes in self._flows.items():
            assert lanes
            for lane, flow in lanes.items():
                tickets = [position[-1] for position in flow.positions]
                assert {self._by_ticket[each].tenant for each in tickets} == {tenant}
                assert {self._by_ticket[each].lane for each in tickets} == {lane}
                priority, order, ticket = flow.positions[0]
                assert flow.shown == (priority, self.shares.level(tenant), order, ticket)
                assert flow.shown in self._lanes[lane]
                in_flows += tickets
        assert sorted(in_flows) == sorted(self._by_ticket)
        assert sum(map(len, self._lanes.values())) == sum(map(len, self._flows.values()))
        self._check_usage()

    def _check_usage(self) -> None:
        for kind in Usage.__slots__:
            by_tenant = dict.fromkeys(self._flows, 0)
            for waiting in self._by_ticket.values():
                by_tenant[waiting.tenant] += 1 if kind == "requests" else getattr(waiting, kind)
            assert getattr(self.usage, kind) == sum(by_tenant.values())
            found = {each: getattr(usage, kind) for each, usage in self._tenant_usage.items()}
            assert found == by_tenant
