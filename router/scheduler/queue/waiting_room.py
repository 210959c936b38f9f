"""All waiting requests of all scopes: a queue per scope, and each request's content."""

from collections.abc import Callable, Hashable
from typing import TypeAlias

from msgspec import Struct, msgpack, structs

from router.errors import KvRouterError
from router.protocol.requests import SelectRequest, Unmet
from router.protocol.values import Scope
from router.scheduler.filters import demanded_target, demands_something
from router.scheduler.queue.admission_queue import AdmissionQueue
from router.scheduler.queue.errors import QueueFullError
from router.scheduler.queue.flows import LimitKind, Waiting
from router.scheduler.queue.policy_classes import (
    Classes,
    PolicyClass,
    QueuePolicies,
    queue_policies,
    single_class,
)
from router.scheduler.settings import QueuePolicy
from router.sequence.active.prompt import Prompt


class Queueing(Struct, frozen=True):
    """Settings of the queues.

    `threshold_frac` and `policy` apply to the single class of models that the `policy_file` (its
    text) does not name, as do `slo_ttft_ms` and `slo_tpot_ms`. `max_requests` and `max_tokens`
    limit all queues together. `no_worker_wait_s`: longest wait for a worker, where there is none;
    0: none. `from_zero`: the scopes that may wait before they ever had one. `slo_unmet`: of classes
    that do not say it.
    """

    threshold_frac: float | None = None
    policy: QueuePolicy = "fcfs"
    policy_file: str = ""
    max_wait_s: float = 60.0
    max_requests: int = 2048
    max_tokens: int = 1 << 26
    no_worker_wait_s: float = 0.0
    from_zero: tuple[Scope, ...] = ()
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_unmet: Unmet = "refuse"

    @property
    def policies(self) -> QueuePolicies:
        """The classes of every model. Raises ConfigError."""
        single = single_class(
            self.threshold_frac,
            self.policy,
            self.max_wait_s,
            self.max_requests,
            self.slo_ttft_ms,
            self.slo_tpot_ms,
        )
        return queue_policies(self.policy_file, single)


class Pending(Struct, frozen=True, eq=False):
    """A waiting request, and the class it waits in. Its tokens are in the prompt."""

    request: SelectRequest
    prompt: Prompt
    policy_class: str


Instead: TypeAlias = Callable[[Scope, float], KvRouterError | None]
HasRoom: TypeAlias = Callable[[SelectRequest, PolicyClass, float], bool]
Refused: TypeAlias = tuple[int, KvRouterError]
"""The ticket of a request that no longer waits, and the error for its caller."""


class WaitingRoom:
    """Waiting requests by ticket and by id, in the queue of their scope.

    `is_used`: requests of some models may wait. `policies`: the classes. `tickets`: of the waiting
    requests with an id.

    Invariants: every pending request is in exactly one queue, under its ticket; a request id waits
    once.
    """

    __slots__ = (
        "_pending",
        "_queues",
        "_tickets",
        "_tokens",
        "is_used",
        "limits",
        "policies",
        "tickets",
    )

    def __init__(self, limits: Queueing) -> None:
        self.policies = limits.policies
        self.is_used = self.policies.are_queueing or limits.no_worker_wait_s > 0
        self.limits = limits
        self._queues: dict[Scope, AdmissionQueue] = {}
        self._pending: dict[int, Pending] = {}
        self.tickets: dict[str, int] = {}
        self._tokens = 0
        self._tickets = 0

    def reconfigure(self, limits: Queueing, policies: QueuePolicies) -> None:
        """Apply other limits, with their classes. O(waiting requests · log).

        Waiting requests are assigned to the new classes and follow their order, but keep the time
        limit that they came with, and none is displaced.
        """
        self.limits, self.policies = limits, policies
        self.is_used = policies.are_queueing or limits.no_worker_wait_s > 0 or bool(self._pending)
        for scope, queue in tuple(self._queues.items()):
            classes = policies.classes(scope.model_name)
            if len(queue) or classes.are_queueing:
                self._queues[scope] = self._moved(queue, classes)
            else:
                del self._queues[scope]

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.tickets

    @property
    def tokens(self) -> int:
        """The number of prompt tokens of all waiting requests."""
        return self._tokens

    def queue(self, scope: Scope) -> AdmissionQueue | None:
        """Return the queue of a scope. Returns None if its model's requests never wait."""
        known = self._queues.get(scope)
        if known is None:
            classes = self.policies.classes(scope.model_name)
            if classes.are_queueing:
                known = self._queues[scope] = AdmissionQueue(classes)
        return known

    def queue_for_worker(self, scope: Scope) -> AdmissionQueue:
        """Return the queue of a scope without workers, whose requests may never wait otherwise."""
        known = self._queues.get(scope)
        if known is None:
            classes = self.policies.classes(scope.model_name)
            known = self._queues[scope] = AdmissionQueue(classes)
        return known

    def queues(self) -> list[tuple[Scope, AdmissionQueue]]:
        """Return all queues, for reading."""
        return list(self._queues.items())

    def usage(self, scope: Scope) -> tuple[int, int]:
        """Return the number of waiting requests of a scope, and their prompt tokens."""
        queue = self._queues.get(scope)
        return (0, 0) if queue is None else (len(queue), queue.isl_tokens)

    def wait(
        self,
        request: SelectRequest,
        prompt: Prompt,
        index: int,
        cached_tokens: int,
        worker_count: int,
        now_s: float,
        longest_s: float | None = None,
    ) -> tuple[int, list[Refused]]:
        """Add a request to a class of its scope. Returns its ticket, and the displaced requests.

        `longest_s`: limit of its wait; None: that of its class. Raises QueueFullError,
        TenantQueueFullError.
        """
        queue = self._queues[request.scope]
        if self._tokens >= self.limits.max_tokens:
            raise self._full(queue, index, "isl_tokens", now_s)
        self._tickets += 1
        ticket, settings = self._tickets, queue.classes.all[index]
        if longest_s is None:
            longest_s = settings.max_wait_s
        sizes = (prompt.isl_tokens, cached_tokens)
        waiting = _waiting(ticket, request, settings, *sizes, longest_s, now_s)
        displaced = queue.push(waiting, index, worker_count, now_s)
        if len(self._pending) >= self.limits.max_requests and not displaced:
            queue.withdraw(ticket)
            raise self._full(queue, index, "requests", now_s)
        self._pending[ticket] = Pending(
            structs.replace(request, token_ids=None), prompt, settings.name
        )
        self._tokens += prompt.isl_tokens
        if request.request_id is not None:
            self.tickets[request.request_id] = ticket
        return ticket, [self._refused(*each) for each in displaced]

    def take(self, has_room: HasRoom, now_s: float) -> tuple[Waiting, Pending] | None:
        """Remove and return the next request that a rank has room for; None if there is none.

        O(classes + lanes of all scopes without a request to place).
        """
        for queue in self._queues.values():
            if not len(queue):
                continue
            waiting = queue.take(
                lambda each, *at: has_room(self._pending[each.ticket].request, *at), now_s
            )
            if waiting is not None:
                return waiting, self._forget(waiting)
        return None

    def withdraw(self, ticket: int) -> bool:
        """Remove a request that was given up by its caller. Returns False if it is not here."""
        pending = self._pending.get(ticket)
        if pending is None:
            return False
        waiting = self._queues[pending.request.scope].withdraw(ticket)
        assert waiting is not None
        self._forget(waiting)
        return True

    def charge(self, request: SelectRequest, index: int, cost_tokens: int, now_s: float) -> None:
        """Charge a request of this class that was sent without waiting."""
        given = request.tenant or "", request.fair_share_id or ""
        self._queues[request.scope].charge(index, *given, cost_tokens, now_s)

    def expire(self, now_s: float, instead: Instead = lambda *_: None) -> list[Refused]:
        """Remove all requests that reached their time limit.

        `instead`: returns the error of a request of a scope that waited this long, if it is
        another than that of the queue.
        """
        return [
            self._refused(waiting, instead(scope, now_s - waiting.since_s) or error)
            for scope, queue in self._queues.items()
            for waiting, error in queue.expire(now_s)
        ]

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(waiting requests)."""
        for queue in self._queues.values():
            queue.check_invariants()
        assert sum(map(len, self._queues.values())) == len(self._pending)
        for ticket, pending in self._pending.items():
            assert ticket in self._queues[pending.request.scope]
        named = {
            pending.request.request_id: ticket
            for ticket, pending in self._pending.items()
            if pending.request.request_id is not None
        }
        assert named == self.tickets
        assert self._tokens == sum(each.prompt.isl_tokens for each in self._pending.values())

    def _moved(self, queue: AdmissionQueue, classes: Classes) -> AdmissionQueue:
        """Return a queue of other classes with the same requests."""
        moved = queue.emptied(classes)
        for each in queue.all:
            pending = self._pending[each.ticket]
            asked, uncached_tokens = pending.request, each.isl_tokens - each.cached_tokens
            index = classes.index(asked.policy_class, uncached_tokens)
            named = classes.all[index]
            arrived = (each.since_s, asked.priority_jump, uncached_tokens, each.expires_s)
            moved.add(structs.replace(each, order=named.order(*arrived)), index)
            self._pending[each.ticket] = structs.replace(pending, policy_class=named.name)
        return moved

    def _full(
        self, queue: AdmissionQueue, index: int, kind: LimitKind, now_s: float
    ) -> QueueFullError:
        current = len(self._pending) if kind == "requests" else self._tokens
        limit = self.limits.max_requests if kind == "requests" else self.limits.max_tokens
        name, retry_s = queue.classes.all[index].name, queue.retry_after_s(index, now_s)
        return QueueFullError(name, kind, current, limit, retry_s)

    def _refused(self, waiting: Waiting, error: KvRouterError) -> Refused:
        self._forget(waiting)
        return waiting.ticket, error

    def _forget(self, waiting: Waiting) -> Pending:
        pending = self._pending.pop(waiting.ticket)
        self._tokens -= pending.prompt.isl_tokens
        self.tickets.pop(pending.request.request_id or "", None)
        return pending


def _waiting(
    ticket: int,
    request: SelectRequest,
    policy_class: PolicyClass,
    isl_tokens: int,
    cached_tokens: int,
    longest_s: float,
    now_s: float,
) -> Waiting:
    expires_s = now_s + min(request.max_wait_s or longest_s, longest_s)
    uncached_tokens = isl_tokens - cached_tokens
    return Waiting(
        ticket=ticket,
        tenant=request.tenant or "",
        fair_share_id=request.fair_share_id or "",
        lane=_lane(request),
        strict_priority=request.strict_priority,
        order=policy_class.order(now_s, request.priority_jump, uncached_tokens, expires_s),
        isl_tokens=isl_tokens,
        cached_tokens=cached_tokens,
        since_s=now_s,
        expires_s=expires_s,
    )


def _lane(request: SelectRequest) -> Hashable:
    """Return a key that is equal for requests that the same ranks can take."""
    if not demands_something(request) and request.prefill_worker_id is None:
        return None
    demands = (
        request.allowed_worker_ids,
        request.excluded_worker_ids,
        request.phase,
        request.pinned_worker,
        request.routing_constraints,
        demanded_target(request),
        request.prefill_worker_id,
        request.lora_name,
    )
    return msgpack.encode(demands)
