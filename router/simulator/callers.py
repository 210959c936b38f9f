"""Those who ask: each sends its request where a router says, and tells the router what becomes of
it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from router.core import RouterCore
from router.effects import AdmitWaiting, Effect, RefuseWaiting
from router.errors import ReservationNotFoundError
from router.placement import Placement
from router.placement_errors import NoEndpointsError
from router.protocol.requests import SelectRequest
from router.queue_errors import QueueFullError, TenantQueueFullError
from router.sequence.prompt import Prompt
from router.simulator.agenda import Agenda
from router.simulator.bus import Bus
from router.simulator.engine import Progress, Work
from router.simulator.outcomes import Outcome

RETRY_S = 0.25
"""How long a caller waits that found nobody to serve it."""

PATIENCE_S = 60.0
"""After how long of that it gives up."""

Submit: TypeAlias = Callable[[int, Work], bool]


class Callers:
    """One for each request; routers are asked in turn.

    `submit` hands work to a worker, and is false where it is not taken. `done`: how many requests
    were served, or given up.
    """

    __slots__ = (
        "_agenda",
        "_bus",
        "_cores",
        "_outcomes",
        "_submit",
        "_waiting",
        "_worker_ids",
        "done",
    )

    def __init__(
        self,
        agenda: Agenda,
        bus: Bus,
        cores: Sequence[RouterCore],
        worker_ids: Sequence[int],
        outcomes: Sequence[Outcome],
        submit: Submit,
    ) -> None:
        self._agenda = agenda
        self._bus = bus
        self._cores = cores
        self._worker_ids = worker_ids
        self._outcomes = outcomes
        self._submit = submit
        self._waiting: dict[tuple[int, int], tuple[int, Sequence[int]]] = {}
        self.done = 0
        bus.on_waiting(self.attend)

    def arrive(self, index: int) -> None:
        """A request comes, and the one after it in its time."""
        if index + 1 < len(self._outcomes):
            self._agenda.at(self._outcomes[index + 1].arrival_s, self.arrive, index + 1)
        self.call(index)

    def call(self, index: int, refused: Sequence[int] = ()) -> None:
        """Go where the router says, elsewhere if that fails, and if nowhere is left, ask later."""
        while (answer := self._ask(index, refused)) is not None:
            if isinstance(answer, int):
                self._waiting[self._core_number(index), answer] = (index, refused)
                return
            if self._goes(index, answer):
                return
            refused = (*refused, answer.rank.worker_id)
        if self._agenda.now_s - self._outcomes[index].arrival_s < PATIENCE_S:
            self._agenda.after(RETRY_S, self.call, index)
        else:
            self.done += 1

    def attend(self, core: RouterCore, effect: AdmitWaiting | RefuseWaiting) -> None:
        """A router speaks of requests that wait: some may go, or one is refused, and gives up."""
        if isinstance(effect, AdmitWaiting):
            self._agenda.after(0.0, self._admit, core)
        elif self._waiting.pop((self._cores.index(core), effect.ticket), None) is not None:
            self.done += 1

    def hear(self, progress: Progress) -> None:
        """Workers answer: first tokens, further blocks of output, last tokens."""
        now_s = self._agenda.now_s
        for work in progress.prefilled:
            outcome, core = self._outcomes[work.caller], self._core_of(work.caller)
            outcome.first_token_s = now_s
            outcome.cached_blocks = work.cached_blocks
            self._tell(core, core.prefill_complete, work.request_id, self._agenda.now_s)
        for work in progress.grown:
            core = self._core_of(work.caller)
            self._tell(core, core.output_block, work.request_id, None, now_s)
        for work in progress.finished:
            self._outcomes[work.caller].finish_s = now_s
            self.done += 1
            self._free(work)

    def lost(self, works: Iterable[Work]) -> None:
        """A worker died under these requests, which begin anew elsewhere."""
        for work in works:
            self._free(work)
            self.call(work.caller)

    def _ask(self, index: int, refused: Sequence[int]) -> Placement | int | None:
        """Where to go, or the ticket to wait with; None: nobody is there. Asked of one router."""
        outcome, core = self._outcomes[index], self._core_of(index)
        outcome.attempts += 1
        asked = SelectRequest(
            sequence_hashes=outcome.request.sequence_hashes,
            isl_tokens=outcome.request.isl_tokens,
            request_id=_request_id(index, outcome),
            allowed_worker_ids=self._others_than(refused),
            tenant=outcome.request.tenant,
        )
        try:
            answer, effects = core.submit(asked, Prompt(asked), self._agenda.now_s)
        except (NoEndpointsError, QueueFullError, TenantQueueFullError):
            return None
        self._bus.perform(core, effects)
        return answer

    def _goes(self, index: int, placement: Placement) -> bool:
        """Whether the worker takes it."""
        outcome, worker_id = self._outcomes[index], placement.rank.worker_id
        work = Work(index, _request_id(index, outcome), outcome.request)
        if self._submit(worker_id, work):
            outcome.worker_id = worker_id
            outcome.placed_s = self._agenda.now_s
            return True
        self._free(work)
        return False

    def _admit(self, core: RouterCore) -> None:
        """All who may go now go."""
        while (admission := core.admit(self._agenda.now_s)) is not None:
            self._bus.perform(core, admission.effects)
            index, refused = self._waiting.pop((self._cores.index(core), admission.ticket))
            placement = admission.outcome
            if not isinstance(placement, Placement):
                self.call(index, refused)
            elif not self._goes(index, placement):
                self.call(index, (*refused, placement.rank.worker_id))

    def _others_than(self, refused: Sequence[int]) -> list[int] | None:
        return [i for i in self._worker_ids if i not in refused] if refused else None

    def _free(self, work: Work) -> None:
        core = self._core_of(work.caller)
        self._tell(core, core.free, work.request_id, self._agenda.now_s)

    def _tell(
        self, core: RouterCore, command: Callable[..., list[Effect]], *arguments: object
    ) -> None:
        """Tell the router that was asked; it may have dropped the request with its worker."""
        try:
            effects = command(*arguments)
        except ReservationNotFoundError:
            return
        self._bus.perform(core, effects)

    def _core_of(self, index: int) -> RouterCore:
        return self._cores[self._core_number(index)]

    def _core_number(self, index: int) -> int:
        return index % len(self._cores)


def _request_id(index: int, outcome: Outcome) -> str:
    return f"{index}.{outcome.attempts}"
