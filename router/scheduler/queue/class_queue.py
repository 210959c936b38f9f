"""The queue of one policy class.

    lane ── requests that the same ranks can take: one head, placeable or not
     └─ tenant ── by strict priority, then by least tokens given recently
         └─ fair share id ── by strict priority, then by least tokens given recently
             └─ requests, by strict priority, then in the order of the class

A request that only one rank can take therefore does not delay the others, and a tenant that submits
ten times its share waits ten times as long, while the other tenants hardly notice. Callers choose
their fair share ids, which therefore divide the share of their tenant and nothing else.
"""

from collections.abc import Callable, Hashable
from typing import TypeAlias

from sortedcontainers import SortedList

from router.scheduler.queue.fair_shares import FairShares, SharesWithin
from router.scheduler.queue.flows import Flow, LimitKind, Tenant, Usage, Waiting
from router.scheduler.queue.policy_classes import PolicyClass

IsFree: TypeAlias = Callable[[Waiting, PolicyClass, float], bool]
"""Returns whether a request can be placed now, at a fraction of its class's busy threshold. The
result is the same for all requests of a lane.
"""

ABOVE_SHARE = 0.5
"""Fraction of the busy threshold for tenants above their share; the rest is for the others."""


class ClassQueue:
    """One class's requests, its credit (`deficit_tokens`), and the tokens given to its tenants.

    Invariants: a ticket is in one flow; each lane has every flow of it once, under the key of its
    first request and its tenant's level; usage is the sum over requests, also by tenant and id.
    """

    __slots__ = (
        "_by_ticket",
        "_lanes",
        "_tenants",
        "deficit_tokens",
        "settings",
        "shares",
        "usage",
        "within",
    )

    def __init__(self, settings: PolicyClass) -> None:
        self.settings = settings
        self.deficit_tokens = 0
        self.usage = Usage()
        self.shares = FairShares()
        self.within = SharesWithin()
        self._by_ticket: dict[int, Waiting] = {}
        self._tenants: dict[str, Tenant] = {}
        self._lanes: dict[Hashable, SortedList] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._by_ticket

    @property
    def tenants(self) -> int:
        """The number of tenants with waiting requests."""
        return len(self._tenants)

    @property
    def all(self) -> list[Waiting]:
        """All waiting requests."""
        return list(self._by_ticket.values())

    def tenant_usage(self, tenant: str) -> Usage:
        """Return the totals of a tenant's waiting requests."""
        known = self._tenants.get(tenant)
        return Usage() if known is None else known.usage

    def is_lighter(self, waiting: Waiting, kind: LimitKind) -> bool:
        """Return whether another fair share id of its tenant has more waiting than a request's.

        The request itself counts, so that equal ids do not displace each other's requests.
        """
        tenant = self._tenants.get(waiting.tenant)
        return tenant is not None and tenant.yields_to(waiting, kind)

    def push(self, waiting: Waiting) -> None:
        """Add a request. O(log requests)."""
        self._by_ticket[waiting.ticket] = waiting
        tenant = self._tenants.setdefault(waiting.tenant, Tenant())
        flow = tenant.flows.setdefault(waiting.lane, Flow())
        flow.add(waiting, self._level(waiting))
        self.usage.add(waiting)
        tenant.count(waiting)
        self._show(waiting.tenant, waiting.lane)

    def remove(self, ticket: int) -> Waiting:
        """Remove a request and return it. O(log requests)."""
        waiting = self._by_ticket.pop(ticket)
        tenant = self._tenants[waiting.tenant]
        tenant.flows[waiting.lane].remove(waiting, self._level(waiting))
        self.usage.add(waiting, -1)
        tenant.count(waiting, -1)
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

    def charge(self, tenant: str, fair_share_id: str, cost_tokens: int, now_s: float) -> None:
        """Charge a tenant, and its fair share id, for tokens given to it by this class."""
        known = self._tenants.get(tenant)
        flows, kept = ({}, {}) if known is None else (known.flows, known.by_id)
        self.within.charge(tenant, fair_share_id, cost_tokens, now_s, kept)
        self.shares.charge(tenant, cost_tokens, now_s)
        self.within.drop(self.shares.forget(kept=self._tenants))
        level = self.within.level(tenant, fair_share_id)
        for lane, flow in tuple(flows.items()):
            flow.show(fair_share_id, level)
            self._show(tenant, lane)

    def last_of_heaviest(self, kind: LimitKind, tenant: str | None = None) -> Waiting:
        """Return the last request, in order, of the fair share id with the highest total of a kind.

        It is one of this tenant; None: of the tenant with the highest total. O(tenants + ids +
        lanes).
        """
        if tenant is None:
            tenant = max(self._tenants, key=lambda each: self._tenants[each].usage.of(kind))
        heaviest = self._tenants[tenant]
        own = heaviest.heaviest_id(kind)
        lasts = (flow.last_of(own) for flow in heaviest.flows.values())
        return self._by_ticket[max(last for last in lasts if last is not None)[-1]]

    def _level(self, waiting: Waiting) -> float:
        return self.within.level(waiting.tenant, waiting.fair_share_id)

    def _show(self, tenant: str, lane: Hashable) -> None:
        """Update the position of a flow in its lane, and remove empty entries."""
        flows = self._tenants[tenant].flows
        flow = flows[lane]
        heads = self._lanes.setdefault(lane, SortedList())
        if flow.shown is not None:
            heads.remove(flow.shown)
        first = flow.first
        if first is not None:
            priority, _, order, ticket = first
            flow.shown = (priority, self.shares.level(tenant), order, ticket)
            heads.add(flow.shown)
            return
        del flows[lane]
        if not flows:
            del self._tenants[tenant]
        if not heads:
            del self._lanes[lane]

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(size of the queue)."""
        in_flows: list[int] = []
        for name, tenant in self._tenants.items():
            assert tenant.flows
            for lane, flow in tenant.flows.items():
                flow.check_invariants()
                ids = flow.tickets()
                assert {
                    (self._by_ticket[each].tenant, self._by_ticket[each].lane) for each in ids
                } == {(name, lane)}
                assert all(self._by_ticket[each].fair_share_id == own for each, own in ids.items())
                assert flow.first is not None
                priority, level, order, ticket = flow.first
                assert level == self.within.level(name, ids[ticket])
                assert flow.shown == (priority, self.shares.level(name), order, ticket)
                assert flow.shown in self._lanes[lane]
                in_flows += ids
        assert sorted(in_flows) == sorted(self._by_ticket)
        flows = sum(len(tenant.flows) for tenant in self._tenants.values())
        assert sum(map(len, self._lanes.values())) == flows
        self._check_usage()

    def _check_usage(self) -> None:
        for kind in Usage.__slots__:
            expected: dict[tuple[str, str], int] = {}
            for waiting in self._by_ticket.values():
                key = (waiting.tenant, waiting.fair_share_id)
                more = 1 if kind == "requests" else getattr(waiting, kind)
                expected[key] = expected.get(key, 0) + more
            assert getattr(self.usage, kind) == sum(expected.values())
            found = {
                (name, own): getattr(usage, kind)
                for name, tenant in self._tenants.items()
                for own, usage in tenant.by_id.items()
            }
            assert found == expected
            totals = [getattr(tenant.usage, kind) for tenant in self._tenants.values()]
            assert sum(totals) == sum(expected.values())
