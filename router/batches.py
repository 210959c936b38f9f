"""Many commands in one call, in order. Other requests are let in between."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec

from router.commands import Commands, asked_with
from router.errors import KvRouterError, MissingRequestIdError
from router.process.bodies import decode_now
from router.protocol.batches import BatchReply, ItemResult, ReservationStep
from router.protocol.requests import SelectRequest

T = TypeVar("T")

UNINTERRUPTED_SELECTIONS = 8
UNINTERRUPTED_STEPS = 128
"""Items answered before others have their turn: about a millisecond."""


class BatchCommands:
    """Batches, on any set of commands."""

    def __init__(self) -> None:
        self._decode_select = msgspec.json.Decoder(SelectRequest).decode
        self._decode_step = msgspec.json.Decoder(ReservationStep).decode

    async def select(self, commands: Commands, requests: Iterable[msgspec.Raw]) -> BatchReply:
        """Choose a rank for each of these."""

        async def one(item: msgspec.Raw) -> ItemResult:
            request = asked_with(decode_now(self._decode_select, bytes(item)), {})
            return ItemResult(200, await commands.select(request))

        return await _each(requests, one, UNINTERRUPTED_SELECTIONS)

    async def progress(self, commands: Commands, steps: Iterable[msgspec.Raw]) -> BatchReply:
        """Take each of these steps."""

        async def one(item: msgspec.Raw) -> ItemResult:
            _take(commands, decode_now(self._decode_step, bytes(item)))
            return ItemResult(200)

        return await _each(steps, one, UNINTERRUPTED_STEPS)


async def _each(
    items: Iterable[T], one: Callable[[T], Awaitable[ItemResult]], uninterrupted: int
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
            commands.prefill_complete(request_id, step.usage)
        case "output_block":
            commands.output_block(request_id, step.decay_fraction)
        case "free":
            commands.free(request_id)
