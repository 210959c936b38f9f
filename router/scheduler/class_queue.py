"""Requests that wait in one policy class.

    lane ── who may be sent to the same ranks: one head that is free or not
     └─ tenant ── by strict priority, then by who was given least of late
         └─ requests, by strict priority, then as the class orders them

So a request that only one rank can take does not hold up the others, and a tenant that asks for ten
times its share waits ten times as long, while the other hardly notices.
"""

from collections.abc import Callable, Hashable
from typing import Literal, TypeAlias

from msgspec import Struct
from sortedcontainers import SortedList

from router.scheduler.fair_share import FairShares
from router.scheduler.policy_classes import PolicyClass

LimitKind: TypeAlias = Literal["requests", "isl_tokens", "cached_tokens"]


class Waiting(Struct, frozen=True, kw_only=True):
    """A request that waits.

    `ticket` grows with arrival. Those of one `lane` can be sent to the same ranks. `order` is its
    place among those of its tenant, the lowest first. `cached_tokens` is as it was when it came,
    and so is what it costs its class and its tenant.
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
        """Uncached tokens, at least one."""
        return max(1, self.isl_tokens - self.cached_tokens)

    @property
    def position(self) -> tuple[int, float, int]:
        """Its place among those of its tenant and lane."""
        return (-self.strict_priority, self.order, self.ticket)


IsFree: TypeAlias = Callable[[Waiting, PolicyClass, float], bool]
"""Whether a request could be sent somewhere now, at such a part of its class's threshold. The same
for all of a lane.
"""

ABOVE_SHARE = 0.5
"""Of the threshold, where others are there: what is left is for those who were given less."""


class Usage:
    """How much waits."""

    __slots__ = ("cached_tokens", "cost_tokens", "isl_tokens", "requests")

    def __init__(self) -> None:
        self.requests = self.isl_tokens = self.cached_tokens = self.cost_tokens = 0

    def add(self, waiting: Waiting, sign: int = 1) -> None:
        """Count a request in, or out."""
        self.requests += sign
        self.isl_tokens += sign * waiting.isl_tokens
        self.cached_tokens += sign * waiting.cached_tokens
        self.cost_tokens += sign * waiting.cost_tokens

    def of(self, kind: LimitKind) -> int:
        """What a limit of this kind limits."""
        value: int = getattr(self, kind)
        return value


class _Flow:
    """Requests of one tenant in one lane; `shown` is the key under which the lane has the first."""

    __slots__ = ("positions", "shown")

    def __init__(self) -> None:
        self.positions: SortedList = SortedList()
        self.shown: tuple[int, float, float, int] | None = None


class ClassQueue:
    """One class's requests, its credit (`deficit_tokens`), and what its tenants were given.

    Invariants: a ticket is in one flow; each lane has every flow of it once, under the key of its
    first request and of what its tenant was given; usage is the sum over requests.
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
        """How many tenants have something waiting."""
        return len(self._flows)

    def tenant_usage(self, tenant: str) -> Usage:
        """How much of a tenant waits."""
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
        """Take a request out. O(log requests)."""
        waiting = self._by_ticket.pop(ticket)
        self._flows[waiting.tenant][waiting.lane].positions.remove(waiting.position)
        self.usage.add(waiting, -1)
        self._tenant_usage[waiting.tenant].add(waiting, -1)
        self._show(waiting.tenant, waiting.lane)
        return waiting

    def first(self, is_free: IsFree) -> Waiting | None:
        """Whose turn it is among those that could be sent somewhere. O(lanes · log lanes)."""
        for *_, ticket in sorted(lane[0] for lane in self._lanes.values()):
            waiting = self._by_ticket[ticket]
            part = ABOVE_SHARE if self.shares.is_above(waiting.tenant) else 1.0
            if is_free(waiting, self.settings, part):
                return waiting
        return None

    def charge(self, tenant: str, cost_tokens: int, now_s: float) -> None:
        """A tenant was given so much of what this class is given."""
        self.shares.charge(tenant, cost_tokens, now_s)
        self.shares.forget(kept=self._flows)
        for lane in tuple(self._flows.get(tenant, ())):
            self._show(tenant, lane)

    def last_of_heaviest(self, kind: LimitKind) -> Waiting:
        """Of the tenant with most of a kind waiting, the request whose turn is last.

        O(tenants + lanes).
        """
        tenant = max(self._tenant_usage, key=lambda each: self._tenant_usage[each].of(kind))
        flows = self._flows[tenant].values()
        return self._by_ticket[max(flow.positions[-1] for flow in flows)[-1]]

    def _show(self, tenant: str, lane: Hashable) -> None:
        """Put a flow where it belongs in its lane, or drop what is empty."""
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
        """Assert the invariants in the class's docstring. O(everything)."""
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
