"""Many commands in one call, in order. Other requests are let in between."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from router.commands import Commands
from router.errors import KvRouterError, MissingRequestIdError
from router.process.bodies import decode_now
from router.protocol.batches import BatchReply, ItemResult, ReservationBatch, ReservationStep
from router.protocol.requests import SelectRequest
from router.request_headers import asked_with
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

_DONE = ItemResult(200)


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

    async def progress(self, caller: Caller, batch: ReservationBatch) -> BatchReply:
        """Take each of these steps."""
        commands, in_batch = self._of(caller, len(batch.steps)), not batch.at_once

        async def one(item: msgspec.Raw) -> ItemResult:
            return self._taken(commands, item, in_batch)

        return await _each(batch.steps, one, UNINTERRUPTED_STEPS)

    def is_immediate(self, batch: ReservationBatch) -> bool:
        """Whether it takes so little time that nobody else need be let in: see `progress_now`."""
        return len(batch.steps) <= UNINTERRUPTED_STEPS

    def progress_now(self, caller: Caller, batch: ReservationBatch) -> BatchReply:
        """`progress` of an immediate batch."""
        commands, in_batch = self._of(caller, len(batch.steps)), not batch.at_once
        results = []
        for item in batch.steps:
            try:
                results.append(self._taken(commands, item, in_batch))
            except KvRouterError as error:
                results.append(_refused(error))
        return BatchReply(results)

    def _taken(self, commands: Commands, item: msgspec.Raw, in_batch: bool) -> ItemResult:
        _take(commands, decode_now(self._decode_step, bytes(item)), in_batch)
        return _DONE

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
            results.append(_refused(error))
        if position % uninterrupted == 0:
            await asyncio.sleep(0)
    return BatchReply(results)


def _refused(error: KvRouterError) -> ItemResult:
    return ItemResult(error.http_status, refused=error.body())


def _take(commands: Commands, step: ReservationStep, in_batch: bool) -> None:
    request_id = step.selection_id or step.request_id
    if request_id is None:
        raise MissingRequestIdError
    match step.step:
        case "prefill_complete":
            commands.prefill_complete(request_id, step.usage, in_batch=in_batch)
        case "output_block":
            commands.output_block(request_id, step.decay_fraction, in_batch=in_batch)
        case "free":
            commands.free(request_id, step.usage)
