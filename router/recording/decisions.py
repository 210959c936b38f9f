"""What a core can be asked, and how it came out: values that can be kept and asked again."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct, structs
from xxhash import xxh3_64_hexdigest

from router.admitter import Admission
from router.core import RouterCore
from router.errors import KvRouterError
from router.placement import Placement
from router.protocol.requests import PromptRequest, ReserveRequest, SelectRequest
from router.protocol.values import Rank
from router.recording.commands import Entry
from router.scheduler.selector import Choice
from router.scheduler.terms import Terms
from router.sequence.prompt import Prompt, prepare

T = TypeVar("T")
Request = TypeVar("Request", bound=PromptRequest)


class Outcome(Struct, frozen=True, omit_defaults=True):
    """How a decision came out: refused, with the error's code, or chosen.

    `terms` and `cost` are those of the chosen rank; `digest` is a hash of the terms and costs of
    all `candidates`, to the last bit. Where the caller chose, there are no terms to weigh.
    `ticket`: of a request that waits from now on, or did until now.
    """

    rank: Rank | None = None
    overlap_blocks: int = 0
    terms: Terms | None = None
    cost: float | None = None
    candidates: int = 0
    digest: str = ""
    refused: str | None = None
    ticket: int | None = None


class Decided(Struct, frozen=True):
    """A decision made again; `choice`: among whom, where the core chose."""

    outcome: Outcome
    choice: Choice | None = None


class Select(Entry, frozen=True, tag="select"):
    """A rank was chosen for a prompt."""

    request: SelectRequest
    now_s: float
    outcome: Outcome

    def decide(self, core: RouterCore) -> Decided:
        """Ask a core. Raises InvalidFieldError for a prompt that cannot have been asked about."""
        prompt = _prompt(core, self.request)
        return _decided(lambda: core.select(self.request, prompt, self.now_s), _chosen)


class SelectAndReserve(Entry, frozen=True, tag="select_and_reserve"):
    """A rank was chosen for a prompt, and booked."""

    request: SelectRequest
    now_s: float
    outcome: Outcome

    def decide(self, core: RouterCore) -> Decided:
        """Ask a core. Raises InvalidFieldError for a prompt that cannot have been asked about."""
        prompt = _prompt(core, self.request)
        return _decided(
            lambda: core.select_and_reserve(self.request, prompt, self.now_s)[0], _chosen
        )


class Submit(Entry, frozen=True, tag="submit"):
    """A rank was chosen for a prompt, and booked; or it waits."""

    request: SelectRequest
    now_s: float
    outcome: Outcome

    def decide(self, core: RouterCore) -> Decided:
        """Ask a core. Raises InvalidFieldError for a prompt that cannot have been asked about."""
        prompt = _prompt(core, self.request)
        return _decided(lambda: core.submit(self.request, prompt, self.now_s)[0], _submitted)


class Admit(Entry, frozen=True, tag="admit"):
    """A request that waited was placed, or refused after all; or it was nobody's turn."""

    now_s: float
    outcome: Outcome = Outcome()
    request_id: str | None = None
    isl_tokens: int = 0

    @classmethod
    def of(cls, now_s: float, admission: Admission | None) -> "Admit":
        """Who was let in."""
        if admission is None:
            return cls(now_s)
        return cls(now_s, admitted(admission), admission.request_id, admission.isl_tokens)

    def decide(self, core: RouterCore) -> Decided:
        """Ask a core."""
        admission = core.admit(self.now_s)
        return Decided(Outcome()) if admission is None else _admitted(admission)


class Reserve(Entry, frozen=True, tag="reserve"):
    """A prompt was booked on a rank that the caller chose."""

    request: ReserveRequest
    now_s: float
    outcome: Outcome

    def decide(self, core: RouterCore) -> Decided:
        """Ask a core. Raises InvalidFieldError for a prompt that cannot have been asked about."""
        prompt = _prompt(core, self.request)
        return _decided(
            lambda: core.reserve(self.request, prompt, self.now_s),
            lambda _: Decided(reserved(core, self.request)),
        )


Decision: TypeAlias = Select | SelectAndReserve | Submit | Admit | Reserve


def chosen(choice: Choice) -> Outcome:
    """The outcome of a choice. O(candidates)."""
    terms, table = choice.chosen, choice.table
    weighed = np.column_stack((table.values, choice.costs))
    return Outcome(
        rank=terms.rank,
        overlap_blocks=terms.overlap_blocks,
        terms=terms,
        cost=float(choice.costs[choice.index]),
        candidates=len(table),
        digest=xxh3_64_hexdigest(weighed.tobytes()),
    )


def submitted(placement: Placement | int) -> Outcome:
    """The outcome of a submission: chosen, or the ticket under which it waits."""
    return Outcome(ticket=placement) if isinstance(placement, int) else chosen(placement.choice)


def admitted(admission: Admission) -> Outcome:
    """The outcome of letting somebody in who waited."""
    outcome = admission.outcome
    came_to = chosen(outcome.choice) if isinstance(outcome, Placement) else refused(outcome)
    return structs.replace(came_to, ticket=admission.ticket)


def reserved(core: RouterCore, request: ReserveRequest) -> Outcome:
    """The outcome of booking where the caller wants it, once it is booked."""
    assert request.request_id is not None
    booked = core.tracker.shared(request.request_id)
    assert booked is not None
    overlap_blocks = booked.cached_tokens // booked.block_size
    return Outcome(rank=booked.rank, overlap_blocks=overlap_blocks)


def refused(error: KvRouterError) -> Outcome:
    """The outcome of a decision that was refused."""
    return Outcome(refused=error.code)


def plain(request: Request, kind: type[Request]) -> Request:
    """A request as itself, whatever interface's variant of it this is."""
    if type(request) is kind:
        return request
    fields: dict[str, Any] = {name: getattr(request, name) for name in kind.__struct_fields__}
    return kind(**fields)


def _prompt(core: RouterCore, request: PromptRequest) -> Prompt:
    return prepare(request, core.identities(request.scope), naming=core.naming)


def _chosen(placement: Placement) -> Decided:
    return Decided(chosen(placement.choice), placement.choice)


def _submitted(placement: Placement | int) -> Decided:
    choice = placement.choice if isinstance(placement, Placement) else None
    return Decided(submitted(placement), choice)


def _admitted(admission: Admission) -> Decided:
    outcome = admission.outcome
    choice = outcome.choice if isinstance(outcome, Placement) else None
    return Decided(admitted(admission), choice)


def _decided(decide: Callable[[], T], told: Callable[[T], Decided]) -> Decided:
    try:
        return told(decide())
    except KvRouterError as error:
        return Decided(refused(error))
