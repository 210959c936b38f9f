"""Simulated clients, which send requests to the ranks that routers select and report progress."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import TypeAlias

from router.core.commands import Admit, Free, OutputBlock, PrefillComplete, Submit
from router.core.core import RouterCore
from router.core.effects import AdmitWaiting, RefuseWaiting
from router.core.placement import Placement
from router.protocol.replicas import PromptUsage
from router.protocol.requests import SelectRequest
from router.scheduler.errors import NoEndpointsError, SloNotMetError
from router.scheduler.queue.errors import QueueFullError, TenantQueueFullError
from router.sequence.active.errors import ReservationNotFoundError
from router.sequence.active.prompt import Prompt
from router.simulator.agenda import EventQueue
from router.simulator.bus import Bus
from router.simulator.engine_runs import Progress, Work
from router.simulator.outcomes import RequestResult
from router.simulator.scenario import Background
from router.simulator.traces import FollowUps, TraceRequest

RETRY_S = 0.25
"""The delay before a client retries when no worker is available."""

PATIENCE_S = 60.0
"""The time after which a client gives up."""

StartWork: TypeAlias = Callable[[int, Work], bool]


class SimulatedClients:
    """One client per request; routers take turns.

    The client of a request that follows others sends it after its think time, or never, if one of
    them was given up.

    `submit` hands work to a worker and returns False if the worker does not accept it. `done`: the
    number of requests served or given up.
    """

    __slots__ = (
        "_agenda",
        "_bus",
        "_cores",
        "_follow_ups",
        "_outcomes",
        "_reports_late",
        "_submit",
        "_waiting",
        "_worker_ids",
        "done",
    )

    def __init__(
        self,
        agenda: EventQueue,
        bus: Bus,
        cores: Sequence[RouterCore],
        worker_ids: Sequence[int],
        outcomes: Sequence[RequestResult],
        submit: StartWork,
        *,
        reports_late: bool = False,
    ) -> None:
        self._reports_late = reports_late
        self._agenda = agenda
        self._bus = bus
        self._cores = cores
        self._worker_ids = worker_ids
        self._outcomes = outcomes
        self._follow_ups = FollowUps([outcome.request for outcome in outcomes])
        self._submit = submit
        self._waiting: dict[tuple[int, int], tuple[int, Sequence[int]]] = {}
        self.done = 0
        bus.on_waiting(self.attend)

    def arrive(self, index: int) -> None:
        """Start a request, and schedule the arrival of the next one that follows no other."""
        following = index + 1
        while following < len(self._outcomes) and self._outcomes[following].request.after:
            following += 1
        if following < len(self._outcomes):
            self._agenda.at(self._outcomes[following].arrival_s, self.arrive, following)
        self.call(index)

    def call(self, index: int, refused: Sequence[int] = ()) -> None:
        """Send a request to the selected worker, to another if that fails, or retry later."""
        while (answer := self._select(index, refused)) is not None:
            if isinstance(answer, int):
                self._waiting[self._core_number(index), answer] = (index, refused)
                return
            if self._goes(index, answer):
                return
            refused = (*refused, answer.rank.worker_id)
        outcome = self._outcomes[index]
        is_patient = self._agenda.now_s - outcome.arrival_s < PATIENCE_S
        if is_patient and not outcome.is_refused:
            self._agenda.after(RETRY_S, self.call, index)
        else:
            self._give_up(index)

    def attend(self, core: RouterCore, effect: AdmitWaiting | RefuseWaiting) -> None:
        """Handle an effect about waiting requests: admit them, or drop a refused one."""
        if isinstance(effect, AdmitWaiting):
            self._agenda.after(0.0, self._admit, core)
        elif waiting := self._waiting.pop((self._cores.index(core), effect.ticket), None):
            self._give_up(waiting[0])

    def receive(self, progress: Progress) -> None:
        """Report first tokens, output blocks and last tokens to the routers."""
        now_s = self._agenda.now_s
        for work in _of_clients(progress.prefilled):
            outcome, core = self._outcomes[work.caller], self._core_of(work.caller)
            outcome.first_token_s = now_s
            outcome.cached_blocks = work.cached_blocks
            completed = PrefillComplete(work.request_id, in_batch=self._reports_late)
            self._report(core, completed)
        for work in _of_clients(progress.grown):
            self._report(self._core_of(work.caller), OutputBlock(work.request_id, None))
        for work in _of_clients(progress.finished):
            self._outcomes[work.caller].finish_s = now_s
            self._free(work, _usage(work.request))
            self._end(work.caller)

    def lost(self, works: Iterable[Work]) -> None:
        """Restart the requests of a worker that died."""
        for work in _of_clients(works):
            self._free(work)
            self.call(work.caller)

    def _end(self, index: int) -> None:
        """Count a request that is served, and schedule those that waited for it alone."""
        self.done += 1
        for follower in self._follow_ups.end(index):
            think_s = self._outcomes[follower].request.think_s
            self._agenda.after(think_s, self._follow, follower)

    def _follow(self, index: int) -> None:
        """Start a request that follows others."""
        self._outcomes[index].arrival_s = self._agenda.now_s
        self.call(index)

    def _give_up(self, index: int) -> None:
        """Count a request that is not served, and all that never arrive because of that."""
        lost = self._follow_ups.lose(index)
        for follower in lost:
            self._outcomes[follower].arrival_s = self._agenda.now_s
        self.done += 1 + len(lost)

    def _select(self, index: int, refused: Sequence[int]) -> Placement | int | None:
        """Return the placement, the ticket if the request waits, or None without a worker.

        A request that is refused for its objectives is given up: None, and never retried.
        """
        outcome, core = self._outcomes[index], self._core_of(index)
        outcome.attempts += 1
        asked = SelectRequest(
            sequence_hashes=outcome.request.sequence_hashes,
            isl_tokens=outcome.request.isl_tokens,
            request_id=_request_id(index, outcome),
            allowed_worker_ids=self._others_than(refused),
            tenant=outcome.request.tenant,
            slo_ttft_ms=outcome.request.slo_ttft_ms,
            slo_tpot_ms=outcome.request.slo_tpot_ms,
        )
        try:
            answer, effects = core.handle(Submit(asked, Prompt(asked)), self._agenda.now_s)
        except (NoEndpointsError, QueueFullError, TenantQueueFullError):
            return None
        except SloNotMetError:
            outcome.is_refused = True
            return None
        self._bus.perform(core, effects)
        return answer

    def _goes(self, index: int, placement: Placement) -> bool:
        """Submit the work; return whether the worker accepts it."""
        outcome, worker_id = self._outcomes[index], placement.rank.worker_id
        work = Work(index, _request_id(index, outcome), outcome.request)
        if self._submit(worker_id, work):
            outcome.worker_id = worker_id
            outcome.placed_s = self._agenda.now_s
            return True
        self._free(work)
        return False

    def _admit(self, core: RouterCore) -> None:
        """Send all requests that are admitted now."""
        while (admission := core.handle(Admit(), self._agenda.now_s)[0]) is not None:
            self._bus.perform(core, admission.effects)
            index, refused = self._waiting.pop((self._cores.index(core), admission.ticket))
            placement = admission.outcome
            if not isinstance(placement, Placement):
                self.call(index, refused)
            elif not self._goes(index, placement):
                self.call(index, (*refused, placement.rank.worker_id))

    def _others_than(self, refused: Sequence[int]) -> list[int] | None:
        return [i for i in self._worker_ids if i not in refused] if refused else None

    def _free(self, work: Work, usage: PromptUsage | None = None) -> None:
        self._report(self._core_of(work.caller), Free(work.request_id, usage))

    def _report(self, core: RouterCore, command: PrefillComplete | OutputBlock | Free) -> None:
        """Report progress to a router. The reservation may have been dropped with its worker."""
        try:
            _, effects = core.handle(command, self._agenda.now_s)
        except ReservationNotFoundError:
            return
        self._bus.perform(core, effects)

    def _core_of(self, index: int) -> RouterCore:
        return self._cores[self._core_number(index)]

    def _core_number(self, index: int) -> int:
        return index % len(self._cores)


class BackgroundRequests:
    """The source of requests that no router knows of."""

    __slots__ = ("_background", "_block_size", "_rng")

    def __init__(self, background: Background, block_size: int, rng: Random) -> None:
        self._background = background
        self._block_size = block_size
        self._rng = rng

    def gap_s(self) -> float:
        """Return the time until the next request of a worker."""
        return self._rng.expovariate(self._background.requests_per_s)

    def next(self) -> Work:
        """Return a new request, without a client."""
        isl_tokens = 1 + int(self._rng.expovariate(1 / self._background.isl_tokens))
        osl_tokens = 1 + int(self._rng.expovariate(1 / self._background.osl_tokens))
        hashes = [self._rng.getrandbits(64) for _ in range(isl_tokens // self._block_size)]
        return Work(-1, "", TraceRequest(0.0, isl_tokens, osl_tokens, hashes))


def _of_clients(works: Iterable[Work]) -> Iterator[Work]:
    """Yield the requests that have a client; others come from elsewhere."""
    return (work for work in works if work.caller >= 0)


def _usage(request: TraceRequest) -> PromptUsage | None:
    """Return the report of a request's output, by which its objective is judged, if it has one."""
    if request.slo_tpot_ms is None:
        return None
    return PromptUsage(
        request.isl_tokens, 0, is_cached_told=False, output_tokens=request.osl_tokens
    )


def _request_id(index: int, outcome: RequestResult) -> str:
    return f"{index}.{outcome.attempts}"
