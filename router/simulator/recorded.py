"""A recording of a router as a trace: its requests, and the fleet that served them.

The length of a response is not recorded. It is estimated, in this order, from the reported output
blocks, from the length that the caller expected, and from the time between the end of the prefill
and the end of the request divided by the engines' step duration.
"""

from collections.abc import Iterable

from msgspec import Struct

from router.core.commands import (
    ApplyLoad,
    Free,
    OutputBlock,
    Placing,
    PrefillComplete,
    Select,
    Upsert,
)
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.loads import LoadCounters
from router.protocol.requests import PromptRequest
from router.protocol.values import Identity, Rank, Scope
from router.recording.entries import Entry
from router.recording.format import Line
from router.sequence.active.prompt import prepare
from router.simulator.calibration import calibrated
from router.simulator.engine_model import EngineModel, llama_8b
from router.simulator.traces import Trace, TraceError, TraceRequest


class RecordedTraffic(Struct, frozen=True):
    """A trace, and a model for each rank of the fleet that served it."""

    trace: Trace
    models: list[EngineModel]


def read_recording(name: str, lines: Iterable[tuple[int, Line]]) -> RecordedTraffic:
    """Return the traffic of a recording's numbered lines after the header. O(bytes).

    Raises TraceError if no request was placed, if workers have different block identities, or if
    requests have several models: one fleet is simulated. Errors raised by `lines` pass through.
    """
    reader = _Reader()
    for number, line in lines:
        reader.take(number, line)
    return reader.traffic(name)


class _Asked(Struct):
    """A placed request, and its reported progress."""

    request: PromptRequest
    arrival_s: float
    expected_tokens: int | None
    output_blocks: int = 0
    prefilled_s: float | None = None
    freed_s: float | None = None


class _Reader:
    __slots__ = ("_booked", "_counters", "_end_s", "_identity", "_open", "_scope", "_selected",
                 "_workers")  # fmt: skip

    def __init__(self) -> None:
        self._workers: dict[int, WorkerAnnouncement] = {}
        self._identity: Identity | None = None
        self._scope: Scope | None = None
        self._counters: dict[tuple[Rank, int], list[LoadCounters]] = {}
        self._selected: list[_Asked] = []
        self._booked: list[_Asked] = []
        self._open: dict[str, _Asked] = {}
        self._end_s = 0.0

    def take(self, number: int, line: Line) -> None:
        """Record the traffic that a line contains."""
        entry, self._end_s = line.entry, line.at_s
        if not isinstance(entry, Entry):
            return
        command = entry.command
        if isinstance(command, Upsert):
            self._note_worker(number, command.announcement)
        elif isinstance(command, ApplyLoad):
            life = command.report.rank, command.report.incarnation
            self._counters.setdefault(life, []).append(command.report.counters)
        elif isinstance(command, Placing):
            if entry.outcome.refused is None:
                self._note_request(number, command, line.at_s)
        elif isinstance(command, PrefillComplete | OutputBlock | Free):
            self._note_progress(command, line.at_s)

    def traffic(self, name: str) -> RecordedTraffic:
        """Return all traffic. Selections without a booking count only if no request was booked."""
        asked = self._booked or self._selected
        if not asked or self._identity is None:
            raise TraceError(1, "recording", "no request was placed", "a recording of traffic")
        first_s, identity, token_s = asked[0].arrival_s, self._identity, self._token_s()
        requests = [
            TraceRequest(
                each.arrival_s - first_s,
                (hashed := prepare(each.request, ()).hashed(identity)).isl_tokens,
                self._osl_tokens(each, identity.block_size, token_s),
                hashed.sequence_hashes.tolist(),
            )
            for each in asked
        ]
        return RecordedTraffic(Trace(name, identity.block_size, requests), self._models())

    def _note_worker(self, number: int, announcement: WorkerAnnouncement) -> None:
        self._workers[announcement.worker_id] = announcement
        if self._identity not in (None, announcement.identity):
            reason = f"{announcement.identity} after {self._identity}"
            raise TraceError(number, "identity", reason, "one for all workers")
        self._identity = announcement.identity

    def _note_request(self, number: int, command: Placing, at_s: float) -> None:
        request = command.request
        if self._scope not in (None, request.scope):
            raise TraceError(number, "model_name", f"{request.scope}", f"only {self._scope}")
        self._scope = request.scope
        asked = _Asked(request, at_s, request.expected_output_tokens)
        if isinstance(command, Select):
            self._selected.append(asked)
            return
        self._booked.append(asked)
        if request.request_id is not None:
            self._open[request.request_id] = asked

    def _note_progress(self, command: PrefillComplete | OutputBlock | Free, at_s: float) -> None:
        asked = self._open.get(command.request_id)
        if asked is None:
            return
        if isinstance(command, PrefillComplete):
            asked.prefilled_s = at_s
        elif isinstance(command, OutputBlock):
            asked.output_blocks += 1
        else:
            asked.freed_s = at_s
            del self._open[command.request_id]

    def _osl_tokens(self, asked: _Asked, block_size: int, token_s: float) -> int:
        if asked.output_blocks:
            return asked.output_blocks * block_size
        if asked.expected_tokens:
            return asked.expected_tokens
        begun_s = asked.arrival_s if asked.prefilled_s is None else asked.prefilled_s
        ended_s = self._end_s if asked.freed_s is None else asked.freed_s
        return 1 + round(max(ended_s - begun_s, 0.0) / token_s)

    def _token_s(self) -> float:
        """Return the mean step duration of all engines, or a preset's if none was reported."""
        lives = [(counters[0], counters[-1]) for counters in self._counters.values()]
        steps = sum(last.steps - first.steps for first, last in lives)
        busy_s = sum(last.busy_s - first.busy_s for first, last in lives)
        return busy_s / steps if steps > 0 and busy_s > 0 else llama_8b().base_s

    def _models(self) -> list[EngineModel]:
        """Return a model per rank: the fleet's constants and each worker's sizes, or a preset's."""
        lives, preset = list(self._counters.values()), llama_8b()
        return [
            calibrated(
                lives,
                preset,
                worker.max_num_batched_tokens or preset.chunk_tokens,
                worker.total_kv_blocks * worker.identity.block_size or preset.capacity_tokens,
            )
            for worker in self._workers.values()
            for _ in worker.ranks
        ]
