"""Requests that wait for room, from their submission to their admission.

submit ─▶ a rank has room, and no request waits ─▶ booked
       └▶ WaitingRoom ─▶ admit, once a rank has room ─▶ booked, or refused after all

Where there is no schedulable worker at all, requests of known scopes wait for one in the same room,
up to `no_worker_wait_s`; others are refused at once, so that strangers make no queues.
"""

from functools import partial

from msgspec import Struct

from router.core.capacity import CapacityMonitor
from router.core.effects import AdmitWaiting, Effect, RefuseWaiting
from router.core.fleet import Fleet
from router.core.placement import Placement
from router.core.placer import Placer
from router.core.reservations import Reservations
from router.errors import KvRouterError
from router.protocol.requests import SelectRequest
from router.protocol.values import Scope
from router.scheduler.queue.admission_queue import AdmissionQueue
from router.scheduler.queue.policy_classes import PolicyClass
from router.scheduler.queue.waiting_room import WaitingRoom
from router.sequence.active.prompt import Prompt
from router.sequence.active.stages import SCHEDULING


class Admission(Struct, frozen=True, eq=False):
    """A result for a request that waited: its placement, or the error that refuses it."""

    ticket: int
    request_id: str | None
    isl_tokens: int
    outcome: Placement | KvRouterError
    policy_class: str
    waited_s: float
    effects: list[Effect]


class AdmissionController:
    """A queue in front of the ranks: requests are booked once a rank has room."""

    __slots__ = ("_capacity", "_fleet", "_placer", "_reservations", "_waiting")

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        reservations: Reservations,
        waiting: WaitingRoom,
        capacity: CapacityMonitor,
    ) -> None:
        self._capacity = capacity
        self._fleet = fleet
        self._placer = placer
        self._reservations = reservations
        self._waiting = waiting

    def submit(
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement | int, list[Effect]]:
        """Book a request, or queue it if all ranks are busy; see `RouterCore`."""
        if not self._fleet.schedulable(request.scope):
            return self._await_worker(request, prompt, now_s)
        queue = self._waiting.queue(request.scope)
        if queue is None:
            return self._reservations.select_and_reserve(request, prompt, now_s)
        self._reservations.bookable_id(request.request_id)
        index, cached_tokens = self._classify(queue, request, prompt, now_s)
        has_room = self._placer.has_room
        if not len(queue) and has_room(request, queue.classes.all[index], 1.0, now_s):
            placement, effects = self._reservations.select_and_reserve(request, prompt, now_s)
            self._waiting.charge(request, index, placement.uncached_tokens, now_s)
            return placement, effects
        if cached_tokens is None:
            cached_tokens = self._placer.cached_tokens(request, prompt, now_s)
        workers = len(self._fleet.schedulable(request.scope))
        ticket, refused = self._waiting.wait(request, prompt, index, cached_tokens, workers, now_s)
        return ticket, [*(RefuseWaiting(*each) for each in refused), AdmitWaiting()]

    def admit(self, now_s: float) -> Admission | None:
        """Place the next waiting request, if a rank has room. Returns None if there is none."""
        taken = self._waiting.take(partial(self._has_room, now_s=now_s), now_s)
        if taken is None:
            return None
        waiting, pending = taken
        if pending.prompt.stages is not None:
            pending.prompt.stages.admitted()
        waited_s = now_s - waiting.since_s
        outcome, effects = self._outcome(pending.request, pending.prompt, now_s, waited_s)
        pending.prompt.end(SCHEDULING)
        return Admission(
            waiting.ticket,
            pending.request.request_id,
            waiting.isl_tokens,
            outcome,
            pending.policy_class,
            waited_s,
            effects,
        )

    def expire(self, now_s: float) -> list[Effect]:
        """Refuse the requests that reached their time limit; of scopes without workers, with that.

        Requests that have waited for a rank with room get the error of their queue.
        """
        return [RefuseWaiting(*each) for each in self._waiting.expire(now_s, self._no_worker)]

    def _no_worker(self, scope: Scope, waited_s: float) -> KvRouterError | None:
        """Return the error of a request that has waited for a worker, or None if it has not."""
        if self._fleet.schedulable(scope) or not self._waiting.limits.no_worker_wait_s:
            return None
        return self._placer.no_workers(scope, waited_s)

    def _await_worker(
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement | int, list[Effect]]:
        """Queue a request of a known scope. Raises NoEndpointsError if it may not wait."""
        scope, longest_s = request.scope, self._waiting.limits.no_worker_wait_s
        self._reservations.bookable_id(request.request_id)
        if not (self._may_wait(request) and self._capacity.knows(scope)):
            raise self._placer.no_workers(scope)
        queue = self._waiting.queue_for_worker(scope)
        index = queue.classes.index(request.policy_class, prompt.isl_tokens)
        ticket, refused = self._waiting.wait(request, prompt, index, 0, 1, now_s, longest_s)
        return ticket, [RefuseWaiting(*each) for each in refused]

    def _may_wait(self, request: SelectRequest) -> bool:
        """Return whether a request may wait for a worker. A remote prefill is done without one."""
        return self._waiting.limits.no_worker_wait_s > 0 and request.phase != "prefill"

    def _has_room(
        self, request: SelectRequest, policy_class: PolicyClass, part: float, now_s: float
    ) -> bool:
        """Return whether a request can be placed, or refused for good: not while it may wait."""
        if not self._fleet.schedulable(request.scope) and self._may_wait(request):
            return False
        return self._placer.has_room(request, policy_class, part, now_s)

    def _classify(
        self, queue: AdmissionQueue, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[int, int | None]:
        """Return the request's class, and its cached tokens if the class depends on them."""
        index = queue.classes.certain(request.policy_class)
        if index is not None:
            return index, None
        cached_tokens = self._placer.cached_tokens(request, prompt, now_s)
        uncached_tokens = prompt.isl_tokens - cached_tokens
        return queue.classes.index(request.policy_class, uncached_tokens), cached_tokens

    def _outcome(
        self, request: SelectRequest, prompt: Prompt, now_s: float, waited_s: float
    ) -> tuple[Placement | KvRouterError, list[Effect]]:
        try:
            return self._reservations.select_and_reserve(request, prompt, now_s, waited_s)
        except KvRouterError as error:
            return error, []
