"""The faults of a registered worker, one sentence each, from its sockets and its server.

    event sockets ──▶ answered, absent, problem ─┐
    HTTP server ────▶ answered, failures, models ┴▶ verdict ▶ not schedulable │ fault of a rank

Every surface shows these sentences as they are made here.
"""

from collections.abc import Collection, Mapping

from msgspec import Struct

from router.core.registered_workers import RegisteredWorker
from router.discovery.engine_servers import ServerState
from router.indexer.rank_index import SourceFault
from router.ingest.direct_rank import RankSockets
from router.protocol.values import Rank

SILENT_S = 2.0
"""The time after which an event socket that never answered is taken to be dead."""

GONE_S = 5.0
"""A worker is not chosen if none of its engines could be reached for this time, until one can."""

LOST_REQUESTS = 3
"""Requests in a row after which a server that answered before is taken to be gone."""

UNNAMED = "default"
"""The model of registrations that name none."""

ESTIMATED = "cached blocks are estimated from bookings"


class Verdict(Struct, frozen=True):
    """The faults of a worker.

    `problem`: the reason why it is not schedulable; `is_unreachable`: it never answered anywhere.
    `faults`: what is wrong with ranks, or with the model of all.
    """

    problem: str | None = None
    is_unreachable: bool = False
    faults: Mapping[Rank, SourceFault] = {}


def verdict(
    worker: RegisteredWorker, sockets: Mapping[Rank, RankSockets], server: ServerState | None
) -> Verdict:
    """Return what is wrong with a worker.

    `sockets`: those that are read; `server`: None if it names no HTTP server, or none is asked.
    """
    problem, is_unreachable = _absence(worker, list(sockets.values()), server)
    names = None if server is None or worker.model_name == UNNAMED else server.last.names
    other = None if names is None else other_model(worker.model_name, names)
    if problem is None and other is not None and server is not None:
        problem = f"{other} (vLLM refuses it)" if server.last.owner == "vllm" else None
    is_alive = problem is None and _is_alive(list(sockets.values()), server)
    faults = {rank: _fault(each, is_estimated=is_alive) for rank, each in sockets.items()}
    if problem is None and other is not None:
        faults = {rank: SourceFault(other, "degrade") for rank in worker.ranks}
    return Verdict(problem, is_unreachable, {r: each for r, each in faults.items() if each})


def other_model(model_name: str, names: Collection[str]) -> str | None:
    """Return that a server lists other models than this one. Returns None if it does not."""
    if model_name in names:
        return None
    shown = ", ".join(repr(name) for name in sorted(names)[:3]) or "no model"
    more = ", …" if len(names) > 3 else ""
    return f"wrong model: its server serves {shown}{more}, not {model_name!r}"


def _absence(
    worker: RegisteredWorker, sockets: list[RankSockets], server: ServerState | None
) -> tuple[str | None, bool]:
    """Return why a worker is taken to be away, None if it is not, and whether it always was."""
    if any(each.was_reached for each in sockets):
        is_gone = all(each.absent_s >= GONE_S for each in sockets)
        return (f"its engines could not be reached for {GONE_S:g} s" if is_gone else None), False
    if any(each.absent_s < SILENT_S for each in sockets):
        return None, False
    if server is None:
        named = "neither an HTTP server, which it does not name, nor its event sockets"
        return (f"unreachable: {named} ever answered", True) if sockets else (None, False)
    endpoint, why = worker.endpoint, server.last.problem
    if server.has_answered:
        is_lost = server.failures >= LOST_REQUESTS
        return (f"{endpoint} does not answer any more: {why}" if is_lost else None), False
    if not server.failures:
        return None, False
    if sockets:
        return f"unreachable: neither {endpoint} nor its event sockets ever answered", True
    return f"unreachable: {endpoint} never answered: {why}", True


def _is_alive(sockets: list[RankSockets], server: ServerState | None) -> bool:
    """Return whether an engine is known to run, whatever its event sockets do."""
    has_answered = server is not None and server.has_answered
    return has_answered or any(each.was_reached for each in sockets)


def _fault(sockets: RankSockets, *, is_estimated: bool) -> SourceFault | None:
    if sockets.was_reached or sockets.absent_s < SILENT_S:
        if sockets.problem is None:
            return None
        return SourceFault(sockets.problem, "degrade" if sockets.is_of_another else "explain")
    text = sockets.problem or f"its events at {sockets.events} never answered"
    if not is_estimated:
        return SourceFault(text)
    return SourceFault(f"{text} ({ESTIMATED})", "estimate")
