"""A recorded command, with the time and, of a decision, its outcome."""

import sys
from math import isfinite, isnan
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_hexdigest

from router.core.admission import Admission
from router.core.commands import (
    ApplyLoad,
    ApplyPolled,
    Command,
    PrefillComplete,
    Reserve,
    Select,
    SelectAndReserve,
    Submit,
)
from router.core.core import RouterCore
from router.core.placement import Placement
from router.errors import KvRouterError
from router.protocol.loads import LoadCounters, LoadReport, PolledLoad, TimedWork
from router.protocol.requests import PromptRequest, ReserveRequest, SelectRequest
from router.protocol.values import Rank
from router.scheduler.selector import Choice
from router.scheduler.terms import Terms

Request = TypeVar("Request", bound=PromptRequest)


class RecordedResult(Struct, frozen=True, omit_defaults=True):
    """The outcome of a decision: a chosen rank, or the code of the error.

    `terms` and `cost` are those of the chosen rank. `digest` is a hash of the terms and costs of
    all `candidates`, exact to the last bit. If the caller chose the rank, there are no terms.
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


NO_RESULT = RecordedResult()


class Entry(Struct, frozen=True):
    """A command as executed at a time. `now_s`: 0 if the command has no time.

    `outcome`: the outcome of a decision. `request_id`, `isl_tokens`: those of an admitted request.
    """

    command: Command[Any]
    now_s: float = 0.0
    outcome: RecordedResult = NO_RESULT
    request_id: str | None = None
    isl_tokens: int = 0


def result_of(core: RouterCore, command: Command[Any], reply: Any) -> RecordedResult:
    """Return the outcome of a decision with this reply or error. O(candidates)."""
    if isinstance(reply, Placement):
        return _chosen(reply.choice)
    if isinstance(reply, KvRouterError):
        return RecordedResult(refused=reply.code)
    if isinstance(reply, Admission):
        return replace(result_of(core, command, reply.outcome), ticket=reply.ticket)
    if isinstance(command, Reserve):
        return _reserved(core, command.request)
    return RecordedResult(ticket=reply)


def choice_of(reply: Any) -> Choice | None:
    """Return the choice in the reply to a decision, if the core chose."""
    placement = reply.outcome if isinstance(reply, Admission) else reply
    return placement.choice if isinstance(placement, Placement) else None


def recordable(command: Command[Any]) -> Command[Any]:
    """Return a command as recordings contain it.

    Hashed prompts are left out, and so is usage, unless a decision may depend on it: rates are
    learned from that of ended requests.
    """
    match command:
        case Reserve(request):
            return Reserve(_plain(request, ReserveRequest))
        case Select(request) | SelectAndReserve(request) | Submit(request):
            return type(command)(_plain(request, SelectRequest))
        case PrefillComplete(request_id, usage, in_batch) if usage is not None:
            return PrefillComplete(request_id, in_batch=in_batch)
        case ApplyLoad(report):
            return ApplyLoad(_finite_report(report))
        case ApplyPolled(report):
            return ApplyPolled(_finite_polled(report))
    return command


def _chosen(choice: Choice) -> RecordedResult:
    terms, table = choice.chosen, choice.table
    weighed = np.column_stack((table.values, choice.costs))
    return RecordedResult(
        rank=terms.rank,
        overlap_blocks=terms.overlap_blocks,
        terms=terms,
        cost=float(choice.costs[choice.index]),
        candidates=len(table),
        digest=xxh3_64_hexdigest(weighed.tobytes()),
    )


def _reserved(core: RouterCore, request: ReserveRequest) -> RecordedResult:
    """Return the outcome of a booking on the caller's rank, after it is booked."""
    assert request.request_id is not None
    booked = core.tracker.shared(request.request_id)
    assert booked is not None
    overlap_blocks = booked.cached_tokens // booked.block_size
    return RecordedResult(rank=booked.rank, overlap_blocks=overlap_blocks)


def _plain(request: Request, kind: type[Request]) -> Request:
    """Return a request as an instance of `kind`, without the fields of its subclass."""
    if type(request) is kind:
        return request
    fields: dict[str, Any] = {name: getattr(request, name) for name in kind.__struct_fields__}
    return kind(**fields)


def _finite_report(report: LoadReport) -> LoadReport:
    """Return a report without infinities, which JSON cannot contain."""
    timed = None if report.timed is None else tuple(map(_finite_work, report.timed))
    counters, waiting_s = _finite_counters(report.counters), _finite(report.waiting_s)
    return replace(report, waiting_s=waiting_s, counters=counters, timed=timed)


def _finite_polled(report: PolledLoad) -> PolledLoad:
    timed = tuple(map(_finite_work, report.timed))
    return replace(report, counters=_finite_counters(report.counters), timed=timed)


def _finite_work(timed: TimedWork) -> TimedWork:
    return TimedWork(_finite_counters(timed.work), _finite(timed.error))


def _finite_counters(counters: LoadCounters) -> LoadCounters:
    if isfinite(counters.busy_s + counters.prefill_token_contexts):
        return counters
    return replace(
        counters,
        busy_s=_finite(counters.busy_s),
        prefill_token_contexts=_finite(counters.prefill_token_contexts),
    )


def _finite(number: float) -> float:
    return 0.0 if isnan(number) else min(number, sys.float_info.max)
