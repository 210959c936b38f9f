"""Dispatch of bus commands to a router's commands."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec import structs

from router.api.batches import BatchCommands
from router.api.caller_commands import Book, OverlapScores, PotentialLoads
from router.api.commands import Commands, PendingRequest, checked_usage
from router.api.request_headers import REQUEST_ID_HEADER, request_id_of, with_header_fields
from router.core.commands import Free, OutputBlock, PrefillComplete, Select, Submit
from router.core.errors import MissingRequestIdError
from router.core.views import workers
from router.protocol.batches import BatchReply
from router.protocol.commands import (
    BatchCommand,
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
    ReserveCommand,
    SelectAndReserveCommand,
    SelectBatchCommand,
    SelectCommand,
    SingleCommand,
)
from router.protocol.replies import (
    Decision,
    FreeMarkedReply,
    NewReply,
    PotentialLoadsReply,
    PrefillMarkedReply,
)
from router.runtime.security.caller import Caller
from router.sequence.active.errors import ReservationNotFoundError

Headers: TypeAlias = Mapping[str, str]

OK = {"status": "ok"}


async def reply_to(
    commands: Commands, command: SingleCommand, caller: Caller, headers: Headers
) -> Any:
    """Execute a command, and return its reply or a PendingRequest.

    `headers`: with names in lower case. Raises what the commands raise.
    """
    match command:
        case SelectCommand():
            return await commands.reply_to(Select(with_header_fields(command, headers)), caller)
        case SelectAndReserveCommand():
            return await commands.reply_to(Submit(with_header_fields(command, headers)), caller)
        case NewCommand():
            request = with_header_fields(command.request, headers)
            reply = await commands.reply_to(Submit(request), caller)
            return reply if isinstance(reply, PendingRequest) else new_reply(reply)
        case ReserveCommand():
            request_id = request_id_of(command.request_id, headers.get(REQUEST_ID_HEADER))
            asked = structs.replace(command, request_id=request_id)
            return await commands.reply_to(Book(asked), caller)
        case LoadsCommand():
            return workers.loads(commands.core)
        case OverlapScoresCommand():
            return await commands.reply_to(OverlapScores(command), caller)
        case PotentialLoadsCommand():
            loads = await commands.reply_to(PotentialLoads(command.request), caller)
            return PotentialLoadsReply(loads, *commands.core.waiting.usage(command.scope))
        case _:
            return _report(commands, command, caller, headers)


async def batch_reply(batches: BatchCommands, command: BatchCommand, caller: Caller) -> BatchReply:
    """Execute a batch of commands, and return their replies."""
    if isinstance(command, SelectBatchCommand):
        return await batches.select(caller, command.requests)
    reply = batches.progress(caller, command)
    return reply if isinstance(reply, BatchReply) else await reply


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
    )


def _report(
    commands: Commands, command: ProgressCommand | MarkCommand, caller: Caller, headers: Headers
) -> Any:
    request_id = request_id_of(command.request_id, headers.get(REQUEST_ID_HEADER))
    if request_id is None:
        raise MissingRequestIdError
    match command:
        case PrefillCompleteCommand():
            usage = checked_usage(command.usage)
            commands.handle(PrefillComplete(request_id, usage), caller)
        case OutputBlockCommand():
            commands.handle(OutputBlock(request_id, command.decay_fraction), caller)
        case FreeCommand():
            commands.handle(Free(request_id, checked_usage(command.usage)), caller)
        case MarkPrefillCommand():
            mark = PrefillComplete(request_id)
            return PrefillMarkedReply(_is_known(commands, mark, caller))
        case MarkFreeCommand():
            return FreeMarkedReply(_is_known(commands, Free(request_id), caller))
    return OK


def _is_known(commands: Commands, mark: PrefillComplete | Free, caller: Caller) -> bool:
    try:
        commands.handle(mark, caller)
    except ReservationNotFoundError:
        return False
    return True
