"""What each command of the bus asks of a router's commands."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from msgspec import structs

from router import rank_views
from router.batches import BatchCommands
from router.commands import Commands, Wait
from router.errors import MissingRequestIdError, ReservationNotFoundError
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
from router.protocol.requests import PromptRequest
from router.request_headers import REQUEST_ID_HEADER, asked_with, request_id_of
from router.security.caller import Caller

Headers: TypeAlias = Mapping[str, str]

OK = {"status": "ok"}


async def answered(commands: Commands, command: SingleCommand, headers: Headers) -> Any:
    """The answer to a command, or a Wait. `headers`: named in lower case. Raises what the commands
    raise.
    """
    match command:
        case SelectCommand():
            return await commands.select(asked_with(command, headers))
        case SelectAndReserveCommand():
            return await commands.submit(asked_with(command, headers))
        case NewCommand():
            submitted = await commands.submit(asked_with(command.request, headers))
            return submitted if isinstance(submitted, Wait) else new_reply(submitted)
        case ReserveCommand():
            request_id = request_id_of(command.request_id, headers.get(REQUEST_ID_HEADER))
            return await commands.reserve(structs.replace(command, request_id=request_id))
        case LoadsCommand():
            return rank_views.loads(commands.core)
        case PotentialLoadsCommand() | OverlapScoresCommand():
            return await _about_prompt(commands, command)
        case _:
            return _about_reservation(commands, command, headers)


async def batch_answered(
    batches: BatchCommands, command: BatchCommand, caller: Caller
) -> BatchReply:
    """The answers to many commands."""
    if isinstance(command, SelectBatchCommand):
        return await batches.select(caller, command.requests)
    return await batches.progress(caller, command)


def new_reply(decision: Decision) -> NewReply:
    """A decision in a few words."""
    return NewReply(
        request_id=decision.request_id or "",
        worker_id=decision.worker_id,
        dp_rank=decision.dp_rank,
        overlap_blocks=decision.overlap_blocks,
        predicted_cached_blocks=decision.predicted_cached_blocks,
        endpoint=decision.endpoint,
        source=decision.source,
    )


async def _about_prompt(
    commands: Commands, command: PotentialLoadsCommand | OverlapScoresCommand
) -> Any:
    if isinstance(command, OverlapScoresCommand):
        return await commands.overlap_scores(command)
    request: PromptRequest = command.request
    loads = await commands.potential_loads(request)
    return PotentialLoadsReply(loads, *commands.core.waiting.usage(request.scope))


def _about_reservation(
    commands: Commands, command: ProgressCommand | MarkCommand, headers: Headers
) -> Any:
    request_id = request_id_of(command.request_id, headers.get(REQUEST_ID_HEADER))
    if request_id is None:
        raise MissingRequestIdError
    match command:
        case PrefillCompleteCommand():
            commands.prefill_complete(request_id, command.usage)
        case OutputBlockCommand():
            commands.output_block(request_id, command.decay_fraction)
        case FreeCommand():
            commands.free(request_id, command.usage)
        case MarkPrefillCommand():
            return PrefillMarkedReply(_is_known(commands.prefill_complete, request_id))
        case MarkFreeCommand():
            return FreeMarkedReply(_is_known(commands.free, request_id))
    return OK


def _is_known(mark: Callable[[str], None], request_id: str) -> bool:
    try:
        mark(request_id)
    except ReservationNotFoundError:
        return False
    return True
