"""Many commands in one call, in order. Other requests are let in between."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from router.commands import Commands, asked_with
from router.errors import KvRouterError, MissingRequestIdError
from router.process.bodies import decode_now
from router.protocol.batches import BatchReply, ItemResult, ReservationStep
from router.protocol.requests import SelectRequest
from router.security.caller import Caller
from router.security.guard import Guard
from router.security.guarded import charge
from router.tenant_commands import commands_of

T = TypeVar("T")

Decoder: TypeAlias = type[msgspec.json.Decoder[Any]] | type[msgspec.msgpack.Decoder[Any]]
"""Of the encoding in which a batch has its items."""

UNINTERRUPTED_SELECTIONS = 8
UNINTERRUPTED_STEPS = 128
"""Items answered before others have their turn: about a millisecond."""


class BatchCommands:
    """Batches, on the commands as each caller has them. Its rates count every item."""

    def __init__(self, commands: Commands, guard: Guard, decoder: Decoder) -> None:
        self._commands = commands
        self._guard = guard
        self._decode_select = decoder(SelectRequest).decode
        self._decode_step = decoder(ReservationStep).decode

    async def select(self, caller: Caller, requests: Sequence[msgspec.Raw]) -> BatchReply:
        """Choose a rank for each of these."""
        commands = self._of(caller, len(requests))

        async def one(item: msgspec.Raw) -> ItemResult:
            request = asked_with(decode_now(self._decode_select, bytes(item)), {})
            return ItemResult(200, await commands.select(request))

        return await _each(requests, one, UNINTERRUPTED_SELECTIONS)

    async def progress(self, caller: Caller, steps: Sequence[msgspec.Raw]) -> BatchReply:
        """Take each of these steps."""
        commands = self._of(caller, len(steps))

        async def one(item: msgspec.Raw) -> ItemResult:
            _take(commands, decode_now(self._decode_step, bytes(item)))
            return ItemResult(200)

        return await _each(steps, one, UNINTERRUPTED_STEPS)

    def _of(self, caller: Caller, items: int) -> Commands:
        charge(self._guard, caller, items)
        return commands_of(self._commands, caller)


async def _each(
    items: Sequence[T], one: Callable[[T], Awaitable[ItemResult]], uninterrupted: int
) -> BatchReply:
    results = []
    for position, item in enumerate(items, 1):
        try:
            results.append(await one(item))
        except KvRouterError as error:
            results.append(ItemResult(error.http_status, refused=error.body()))
        if position % uninterrupted == 0:
            await asyncio.sleep(0)
    return BatchReply(results)


def _take(commands: Commands, step: ReservationStep) -> None:
    request_id = step.selection_id or step.request_id
    if request_id is None:
        raise MissingRequestIdError
    match step.step:
        case "prefill_complete":
            commands.prefill_complete(request_id, step.usage, in_batch=True)
        case "output_block":
            commands.output_block(request_id, step.decay_fraction, in_batch=True)
        case "free":
            commands.free(request_id, step.usage)
