"""Admission queues, and the choice of the next request.

Between classes: deficit round robin. Each round grants every class its quantum of uncached tokens,
and a class with enough credit for its first request may send it. Within a class: see `class_queue`.
A class without requests, or without a request that can be placed now, is skipped and granted
nothing, so that no rank stays idle while some request could use it.
"""

from sortedcontainers import SortedList

from router.scheduler.errors import SHORTEST_RETRY_S
from router.scheduler.queue.class_queue import ClassQueue, IsFree
from router.scheduler.queue.errors import QueueFullError, QueueTimeoutError, TenantQueueFullError
from router.scheduler.queue.flows import LimitKind, Waiting
from router.scheduler.queue.policy_classes import Classes, PolicyClass


class AdmissionQueue:
    """The queue of one scope, with all its classes.

    Invariants: a ticket waits in one class and is once in the order of expiry; credit is never
    negative, and a class without requests has none.
    """

    __slots__ = ("_by_expiry", "_class_of", "_cursor", "_is_visiting", "classes", "queues")

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self.queues = tuple(ClassQueue(each) for each in classes.all)
        self._class_of: dict[int, int] = {}
        self._by_expiry: SortedList = SortedList()
        self._cursor = 0
        self._is_visiting = False

    def __len__(self) -> int:
        return len(self._class_of)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._class_of

    @property
    def all(self) -> list[Waiting]:
        """All waiting requests, in the order of their arrival."""
        return sorted((w for each in self.queues for w in each.all), key=lambda w: w.ticket)

    @property
    def isl_tokens(self) -> int:
        """The number of prompt tokens of all waiting requests."""
        return sum(queue.usage.isl_tokens for queue in self.queues)

    def push(
        self, waiting: Waiting, index: int, worker_count: int, now_s: float
    ) -> list[tuple[Waiting, TenantQueueFullError]]:
        """Add a request to a class. Returns the requests that it displaced, and why.

        If a limit is reached, a tenant with less than an equal share of the waiting requests
        displaces the last request of the heaviest tenant. Within a tenant that has its share, a
        fair share id displaces the last request of a heavier one. Raises QueueFullError,
        TenantQueueFullError.
        """
        queue = self.queues[index]
        limits = _limits(queue.settings, worker_count)
        for kind, limit in limits:
            _check_share(queue, waiting, kind, limit, now_s)
        displaced = []
        for kind, limit in limits:
            while queue.usage.of(kind) >= limit:
                is_below = _is_below_share(queue, waiting.tenant, kind, limit)
                last = queue.last_of_heaviest(kind, None if is_below else waiting.tenant)
                displaced.append((last, _share_error(queue, last.tenant, kind, limit, now_s)))
                self._remove(last.ticket)
        self.add(waiting, index)
        return displaced

    def add(self, waiting: Waiting, index: int) -> None:
        """Add a request to a class, whatever its limits. O(log requests)."""
        self.queues[index].push(waiting)
        self._class_of[waiting.ticket] = index
        self._by_expiry.add((waiting.expires_s, waiting.ticket))

    def emptied(self, classes: Classes) -> "AdmissionQueue":
        """Return an empty queue for other classes; tenants keep what they got in those by name."""
        queue, known = AdmissionQueue(classes), {each.settings.name: each for each in self.queues}
        for each in queue.queues:
            before = known.get(each.settings.name)
            if before is not None:
                each.shares, each.within = before.shares, before.within
        return queue

    def take(self, is_free: IsFree, now_s: float) -> Waiting | None:
        """Remove and return the next request that can be placed; None if none can.

        O(classes + lanes), whatever the request costs.
        """
        heads = [queue.first(is_free) for queue in self.queues]
        costs = [None if head is None else head.cost_tokens for head in heads]
        if not any(costs):
            return None
        index = self._arbitrate(costs)
        head = heads[index]
        assert head is not None
        self.queues[index].deficit_tokens -= head.cost_tokens
        self.queues[index].charge(head.tenant, head.fair_share_id, head.cost_tokens, now_s)
        return self._remove(head.ticket)

    def charge(
        self, index: int, tenant: str, fair_share_id: str, cost_tokens: int, now_s: float
    ) -> None:
        """Charge a request of this class, tenant and id that was sent without waiting."""
        self.queues[index].charge(tenant, fair_share_id, max(1, cost_tokens), now_s)

    def withdraw(self, ticket: int) -> Waiting | None:
        """Remove a request that was given up by its caller; None if it does not wait any more."""
        return self._remove(ticket) if ticket in self._class_of else None

    def expire(self, now_s: float) -> list[tuple[Waiting, QueueTimeoutError]]:
        """Remove all requests that reached their time limit. O(expired · log all)."""
        expired = []
        while self._by_expiry and self._by_expiry[0][0] <= now_s:
            ticket = self._by_expiry[0][1]
            queue = self.queues[self._class_of[ticket]]
            retry_s = _retry_after_s(queue, now_s, queue.usage.cost_tokens)
            waiting = self._remove(ticket)
            waited_s = now_s - waiting.since_s
            expired.append((waiting, QueueTimeoutError(queue.settings.name, waited_s, retry_s)))
        return expired

    def retry_after_s(self, index: int, now_s: float) -> float:
        """Return the time until all requests of a class are placed, at the recent rate."""
        queue = self.queues[index]
        return _retry_after_s(queue, now_s, queue.usage.cost_tokens)

    def _arbitrate(self, costs: list[int | None]) -> int:
        """Return the class to serve, of those with a cost; grants the credit for it.

        A request may cost many quanta: rounds without a result are granted at once.
        """
        index = self._visit(costs)
        if index is None:
            rounds = min(
                -((queue.deficit_tokens - cost) // queue.settings.quantum)
                for queue, cost in zip(self.queues, costs, strict=True)
                if cost is not None
            )
            for queue, cost in zip(self.queues, costs, strict=True):
                if cost is not None:
                    queue.deficit_tokens += (rounds - 1) * queue.settings.quantum
            index = self._visit(costs)
        assert index is not None
        return index

    def _visit(self, costs: list[int | None]) -> int | None:
        """Visit each class once, from the cursor on. Returns the first that can pay; None if none.

        A class is granted its quantum once per visit, however many requests it then pays for.
        """
        size = len(self.queues)
        for index in range(self._cursor, self._cursor + size):
            queue, cost = self.queues[index % size], costs[index % size]
            was_granted = self._is_visiting
            self._is_visiting = False
            if cost is None:
                continue
            if queue.deficit_tokens < cost and not was_granted:
                queue.deficit_tokens += queue.settings.quantum
            if queue.deficit_tokens >= cost:
                self._cursor, self._is_visiting = index % size, True
                return self._cursor
        return None

    def _remove(self, ticket: int) -> Waiting:
        queue = self.queues[self._class_of.pop(ticket)]
        waiting = queue.remove(ticket)
        self._by_expiry.remove((waiting.expires_s, ticket))
        if not len(queue):
            self._leave(queue)
        return waiting

    def _leave(self, queue: ClassQueue) -> None:
        """Clear the credit of an empty class, and move the cursor past it."""
        queue.deficit_tokens = 0
        if queue is self.queues[self._cursor]:
            self._cursor = (self._cursor + 1) % len(self.queues)
            self._is_visiting = False

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(size of the queue)."""
        for index, queue in enumerate(self.queues):
            queue.check_invariants()
            assert queue.deficit_tokens >= 0
            assert len(queue) or not queue.deficit_tokens
            here = [ticket for ticket, at in self._class_of.items() if at == index]
            assert len(queue) == len(here)
            assert all(ticket in queue for ticket in here)
        assert {ticket for _, ticket in self._by_expiry} == set(self._class_of)
        assert len(self._by_expiry) == len(self)


def _limits(settings: PolicyClass, worker_count: int) -> list[tuple[LimitKind, int]]:
    """Return the limits of a class. They apply to arrivals: a lost worker displaces no request."""
    per_worker: tuple[tuple[LimitKind, int | None], ...] = (
        ("requests", settings.request_queue_limit_per_worker),
        ("isl_tokens", settings.raw_isl_token_queue_limit_per_worker),
        ("cached_tokens", settings.cached_token_queue_limit_per_worker),
    )
    limits = [(kind, each * worker_count) for kind, each in per_worker if each is not None]
    if settings.request_queue_limit is not None:
        limits.append(("requests", settings.request_queue_limit))
    return limits


def _check_share(
    queue: ClassQueue, waiting: Waiting, kind: LimitKind, limit: int, now_s: float
) -> None:
    """Raise if a limit is reached and this request may not displace another."""
    current, tenant = queue.usage.of(kind), waiting.tenant
    if current < limit or _is_below_share(queue, tenant, kind, limit):
        return
    if limit and queue.is_lighter(waiting, kind):
        return
    if _tenants(queue, tenant) == 1:
        retry_s = _retry_after_s(queue, now_s, queue.usage.cost_tokens)
        raise QueueFullError(queue.settings.name, kind, current, limit, retry_s)
    raise _share_error(queue, tenant, kind, limit, now_s)


def _is_below_share(queue: ClassQueue, tenant: str, kind: LimitKind, limit: int) -> bool:
    """Return whether a tenant, beside others, has less waiting than an equal share of a limit."""
    tenants = _tenants(queue, tenant)
    return tenants > 1 and queue.tenant_usage(tenant).of(kind) * tenants < limit


def _tenants(queue: ClassQueue, tenant: str) -> int:
    """Return the number of tenants with waiting requests, this one included."""
    return queue.tenants + (queue.tenant_usage(tenant).requests == 0)


def _retry_after_s(queue: ClassQueue, now_s: float, ahead_tokens: float) -> float:
    """Return the time until `ahead_tokens` are placed, at the recent rate."""
    tokens_per_s = queue.shares.tokens_per_s(now_s)
    longest_s = max(SHORTEST_RETRY_S, queue.settings.max_wait_s)
    if ahead_tokens >= tokens_per_s * longest_s:
        return longest_s
    return max(SHORTEST_RETRY_S, ahead_tokens / tokens_per_s)


def _share_error(
    queue: ClassQueue, tenant: str, kind: LimitKind, limit: int, now_s: float
) -> TenantQueueFullError:
    mine = queue.tenant_usage(tenant)
    tenants = max(1, queue.tenants)
    retry_s = _retry_after_s(queue, now_s, mine.cost_tokens * tenants)
    return TenantQueueFullError(
        tenant, queue.settings.name, kind, mine.of(kind), limit / tenants, retry_s
    )
