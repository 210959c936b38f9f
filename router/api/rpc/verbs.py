"""Dispatch of bus commands to a router's commands."""

import time
from collections.abc import Awaitable, Callable, Mapping
from inspect import iscoroutine
from typing import Any, TypeAlias

from msgspec import UNSET, Struct, structs

from router.api.batches import BatchCommands
from router.api.caller_commands import Book, OverlapScores, PotentialLoads
from router.api.commands import Commands, checked_usage
from router.api.request_headers import REQUEST_ID_HEADER, request_id_of, with_header_fields
from router.core.commands import Free, OutputBlock, PrefillComplete, Select, Submit
from router.core.errors import MissingRequestIdError
from router.core.views.capacity import capacity
from router.protocol.commands import (
    CapacityCommand,
    Command,
    FreeCommand,
    LoadsCommand,
    MarkCommand,
    MarkFreeCommand,
    MarkPrefillCommand,
    NewCommand,
    OutputBlockCommand,
    OverlapScoresCommand,
    PotentialLoadsCommand,
    PrefillCompleteCommand,
    ProgressCommand,
    ReservationBatchCommand,
    ReserveCommand,
    SelectAndReserveCommand,
    SelectBatchCommand,
    SelectCommand,
)
from router.protocol.replies import (
    Decision,
    FreeMarkedReply,
    LoadForecast,
    NewReply,
    PotentialLoadsReply,
    PrefillMarkedReply,
)
from router.protocol.values import Scope
from router.runtime.process.json_bodies import structs_of
from router.runtime.security.caller import Caller
from router.sequence.active.errors import ReservationNotFoundError

Fields: TypeAlias = Mapping[str, str]
"""Headers with fields of a request, by their names in lower case."""

OK = {"status": "ok"}


class Verb(Struct, frozen=True, eq=False):
    """A command of the bus: its name for callers and metrics, and its execution.

    `act`: returns the reply, a PendingRequest, or a coroutine of one of them, and raises what the
    commands raise. `shape`: returns what is sent for a reply; None if that is the reply itself.
    """

    name: str
    act: Callable[[Any, Caller, Fields], Any]
    shape: Callable[[Any], Any] | None = None


class Verbs:
    """The commands of the bus, by their types. `batches`: of one encoding."""

    def __init__(self, commands: Commands, batches: BatchCommands) -> None:
        self._commands = commands
        self._batches = batches
        acts: dict[type, Callable[[Any, Caller, Fields], Any]] = {
            SelectCommand: self._select,
            SelectAndReserveCommand: self._select_and_reserve,
            NewCommand: self._new,
            ReserveCommand: self._reserve,
            PrefillCompleteCommand: self._prefill_complete,
            OutputBlockCommand: self._output_block,
            FreeCommand: self._free,
            MarkPrefillCommand: self._mark_prefill,
            MarkFreeCommand: self._mark_free,
            LoadsCommand: self._loads,
            CapacityCommand: self._capacity,
            OverlapScoresCommand: self._overlap_scores,
            PotentialLoadsCommand: self._potential_loads,
            SelectBatchCommand: self._select_batch,
            ReservationBatchCommand: self._reservation_batch,
        }
        shapes = {NewCommand: new_reply}
        self.of = {
            kind: Verb(str(kind.__struct_config__.tag), acts[kind], shapes.get(kind))
            for kind in structs_of(Command)
        }

    def _select(self, command: SelectCommand, caller: Caller, fields: Fields) -> Any:
        return self._commands.handle(Select(with_header_fields(command, fields)), caller)

    def _select_and_reserve(
        self, command: SelectAndReserveCommand, caller: Caller, fields: Fields
    ) -> Any:
        return self._commands.handle(Submit(with_header_fields(command, fields)), caller)

    def _new(self, command: NewCommand, caller: Caller, fields: Fields) -> Any:
        return self._commands.handle(Submit(with_header_fields(command.request, fields)), caller)

    def _reserve(self, command: ReserveCommand, caller: Caller, fields: Fields) -> Any:
        request_id = request_id_of(command.request_id, fields.get(REQUEST_ID_HEADER))
        return self._commands.handle(Book(structs.replace(command, request_id=request_id)), caller)

    def _prefill_complete(
        self, command: PrefillCompleteCommand, caller: Caller, fields: Fields
    ) -> Any:
        report = PrefillComplete(_id_of(command, fields), checked_usage(command.usage))
        self._commands.handle(report, caller)
        return OK

    def _output_block(self, command: OutputBlockCommand, caller: Caller, fields: Fields) -> Any:
        report = OutputBlock(_id_of(command, fields), command.decay_fraction)
        self._commands.handle(report, caller)
        return OK

    def _free(self, command: FreeCommand, caller: Caller, fields: Fields) -> Any:
        self._commands.handle(Free(_id_of(command, fields), checked_usage(command.usage)), caller)
        return OK

    def _mark_prefill(self, command: MarkPrefillCommand, caller: Caller, fields: Fields) -> Any:
        return PrefillMarkedReply(self._mark(PrefillComplete(_id_of(command, fields)), caller))

    def _mark_free(self, command: MarkFreeCommand, caller: Caller, fields: Fields) -> Any:
        return FreeMarkedReply(self._mark(Free(_id_of(command, fields)), caller))

    def _mark(self, mark: PrefillComplete | Free, caller: Caller) -> bool:
        """Return whether the request was known."""
        try:
            self._commands.handle(mark, caller)
        except ReservationNotFoundError:
            return False
        return True

    def _loads(self, _command: LoadsCommand, _caller: Caller, _: Fields) -> Any:
        return self._commands.splits.loads()

    def _capacity(self, _command: CapacityCommand, _caller: Caller, _: Fields) -> Any:
        return capacity(self._commands.core, time.monotonic())

    def _overlap_scores(self, command: OverlapScoresCommand, caller: Caller, _: Fields) -> Any:
        return self._commands.handle(OverlapScores(command), caller)

    def _potential_loads(self, command: PotentialLoadsCommand, caller: Caller, _: Fields) -> Any:
        loads = self._commands.handle(PotentialLoads(command.request), caller)
        if iscoroutine(loads):
            return self._loads_later(command.scope, loads)
        return self._loads_reply(command.scope, loads)

    async def _loads_later(
        self, scope: Scope, loads: Awaitable[LoadForecast]
    ) -> PotentialLoadsReply:
        return self._loads_reply(scope, await loads)

    def _loads_reply(self, scope: Scope, forecast: LoadForecast) -> PotentialLoadsReply:
        waiting = self._commands.core.waiting.usage(scope)
        return PotentialLoadsReply(forecast.loads, *waiting, forecast.warnings or UNSET)

    def _select_batch(self, command: SelectBatchCommand, caller: Caller, _: Fields) -> Any:
        return self._batches.select(caller, command.requests)

    def _reservation_batch(
        self, command: ReservationBatchCommand, caller: Caller, _: Fields
    ) -> Any:
        return self._batches.progress(caller, command)


def new_reply(decision: Decision) -> NewReply:
    """Return the short form of a decision."""
    return NewReply(
        request_id=decision.request_id or "",
        worker_id=decision.worker_id,
        dp_rank=decision.dp_rank,
        overlap_blocks=decision.overlap_blocks,
        predicted_cached_blocks=decision.predicted_cached_blocks,
        endpoint=decision.endpoint,
        source=decision.source,
        warnings=decision.warnings,
    )


def _id_of(command: ProgressCommand | MarkCommand, fields: Fields) -> str:
    """Return the id of a reservation. Raises MissingRequestIdError, InvalidFieldError."""
    request_id = command.request_id
    if request_id is None:
        request_id = request_id_of(None, fields.get(REQUEST_ID_HEADER))
    if request_id is None:
        raise MissingRequestIdError
    return request_id
