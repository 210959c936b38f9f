"""Requests that wait for room, from their submission to their admission.

submit ─▶ a rank has room, and no request waits ─▶ booked
       └▶ WaitingRoom ─▶ admit, once a rank has room ─▶ booked, or refused after all
"""

from functools import partial

from msgspec import Struct

from router.core.effects import AdmitWaiting, Effect, RefuseWaiting
from router.core.fleet import Fleet
from router.core.placement import Placement
from router.core.placer import Placer
from router.core.reservations import Reservations
from router.errors import KvRouterError
from router.protocol.requests import SelectRequest
from router.scheduler.queue.admission_queue import AdmissionQueue
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

    __slots__ = ("_fleet", "_placer", "_reservations", "_waiting")

    def __init__(
        self, fleet: Fleet, placer: Placer, reservations: Reservations, waiting: WaitingRoom
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._reservations = reservations
        self._waiting = waiting

    def submit(
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement | int, list[Effect]]:
        """Book a request, or queue it if all ranks are busy; see `RouterCore`."""
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
        taken = self._waiting.take(partial(self._placer.has_room, now_s=now_s), now_s)
        if taken is None:
            return None
        waiting, pending = taken
        if pending.prompt.stages is not None:
            pending.prompt.stages.admitted()
        outcome, effects = self._outcome(pending.request, pending.prompt, now_s)
        pending.prompt.end(SCHEDULING)
        return Admission(
            waiting.ticket,
            pending.request.request_id,
            waiting.isl_tokens,
            outcome,
            pending.policy_class,
            now_s - waiting.since_s,
            effects,
        )

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
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement | KvRouterError, list[Effect]]:
        try:
            return self._reservations.select_and_reserve(request, prompt, now_s)
        except KvRouterError as error:
            return error, []
