"""Waiting requests of one tenant: in each lane its flow, and its totals, each by fair share id."""

from collections.abc import Hashable
from typing import Literal, TypeAlias

from msgspec import Struct
from sortedcontainers import SortedList

LimitKind: TypeAlias = Literal["requests", "isl_tokens", "cached_tokens"]


class Waiting(Struct, frozen=True, kw_only=True):
    """A waiting request.

    `ticket` grows with arrival. Requests of one `lane` can be sent to the same ranks. `order` is
    the rank among those of the tenant, the lowest first. `cached_tokens`, and with it the cost to
    class and tenant, is fixed at arrival.
    """

    ticket: int
    tenant: str = ""
    fair_share_id: str = ""
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
        """The sort key among the requests of its fair share id and lane."""
        return (-self.strict_priority, self.order, self.ticket)


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


Head: TypeAlias = tuple[int, float, float, int]
"""Negated strict priority, level, order and ticket of a first request."""


class Flow:
    """Requests of one tenant in one lane; `shown` is the key of the first one in the lane.

    Invariants: `_heads` has the first request of every id once, under the level of that id.
    """

    __slots__ = ("_head_of", "_heads", "_positions", "shown")

    def __init__(self) -> None:
        self._positions: dict[str, SortedList] = {}
        self._head_of: dict[str, Head] = {}
        self._heads: SortedList = SortedList()
        self.shown: Head | None = None

    def add(self, waiting: Waiting, level: float) -> None:
        """Add a request; `level`: of its fair share id. O(log requests)."""
        self._positions.setdefault(waiting.fair_share_id, SortedList()).add(waiting.position)
        self.show(waiting.fair_share_id, level)

    def remove(self, waiting: Waiting, level: float) -> None:
        """Remove a request; `level`: of its fair share id. O(log requests)."""
        self._positions[waiting.fair_share_id].remove(waiting.position)
        self.show(waiting.fair_share_id, level)

    def show(self, fair_share_id: str, level: float) -> None:
        """Update the position of an id among the others, and remove an empty one. O(log ids)."""
        before = self._head_of.pop(fair_share_id, None)
        if before is not None:
            self._heads.remove(before)
        positions = self._positions.get(fair_share_id)
        if positions:
            priority, order, ticket = positions[0]
            head = self._head_of[fair_share_id] = (priority, level, order, ticket)
            self._heads.add(head)
        else:
            self._positions.pop(fair_share_id, None)

    @property
    def first(self) -> Head | None:
        """The key of the next request; None if there is none."""
        return self._heads[0] if self._heads else None

    def last_of(self, fair_share_id: str) -> tuple[int, float, int] | None:
        """Return the position of the last request of an id. Returns None if it has none."""
        positions = self._positions.get(fair_share_id)
        return positions[-1] if positions else None

    def tickets(self) -> dict[int, str]:
        """Return the fair share id of each request, by ticket. O(requests)."""
        return {each[-1]: name for name, own in self._positions.items() for each in own}

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(requests)."""
        assert all(self._positions.values())
        assert sorted(self._head_of.values()) == list(self._heads)
        firsts = {name: tuple(own[0]) for name, own in self._positions.items()}
        heads = self._head_of.items()
        assert {name: (head[0], head[2], head[3]) for name, head in heads} == firsts


class Tenant:
    """The waiting requests of a tenant: its flow in each lane, and totals, also by id."""

    __slots__ = ("by_id", "flows", "usage")

    def __init__(self) -> None:
        self.flows: dict[Hashable, Flow] = {}
        self.usage = Usage()
        self.by_id: dict[str, Usage] = {}

    def count(self, waiting: Waiting, sign: int = 1) -> None:
        """Add a request to the totals, or subtract it."""
        self.usage.add(waiting, sign)
        own = self.by_id.setdefault(waiting.fair_share_id, Usage())
        own.add(waiting, sign)
        if not own.requests:
            del self.by_id[waiting.fair_share_id]

    def heaviest_id(self, kind: LimitKind) -> str:
        """Return the fair share id with the highest total of a kind. O(ids)."""
        return max(self.by_id, key=lambda each: self.by_id[each].of(kind))

    def yields_to(self, waiting: Waiting, kind: LimitKind) -> bool:
        """Return whether its heaviest id has more waiting than this request's, with the request."""
        after = Usage()
        after.add(waiting)
        own = self.by_id.get(waiting.fair_share_id)
        total = after.of(kind) + (0 if own is None else own.of(kind))
        return bool(self.by_id) and self.by_id[self.heaviest_id(kind)].of(kind) > total
