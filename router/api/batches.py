"""Batches of commands in one call, in order; other requests run in between."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from router.api.commands import Commands, checked_usage
from router.api.request_headers import with_header_fields
from router.core.commands import Free, OutputBlock, PrefillComplete, Select
from router.core.errors import MissingRequestIdError
from router.errors import KvRouterError
from router.protocol.batches import BatchReply, ItemResult, ReservationBatch, ReservationStep
from router.protocol.requests import SelectRequest
from router.runtime.process.json_bodies import decode_now
from router.runtime.security.caller import Caller
from router.runtime.security.guard import Guard
from router.runtime.security.guarded import charge

Decoder: TypeAlias = type[msgspec.json.Decoder[Any]] | type[msgspec.msgpack.Decoder[Any]]
"""A decoder of the encoding of a batch's items."""

UNINTERRUPTED_SELECTIONS = 8
UNINTERRUPTED_STEPS = 128
"""Items processed before other requests run, about a millisecond."""

DONE = ItemResult(200)


class BatchCommands:
    """Batches of commands on behalf of callers. Each item counts in the caller's rate limit."""

    def __init__(self, commands: Commands, guard: Guard, decoder: Decoder) -> None:
        self._commands = commands
        self._guard = guard
        self._decode_select = decoder(SelectRequest).decode
        self._decode_step = decoder(ReservationStep).decode

    async def select(self, caller: Caller, requests: Sequence[msgspec.Raw]) -> BatchReply:
        """Choose a rank for each request."""
        charge(self._guard, caller, len(requests))
        results = []
        for position, item in enumerate(requests, 1):
            try:
                request = with_header_fields(decode_now(self._decode_select, bytes(item)), {})
                reply = await self._commands.reply_to(Select(request), caller)
                results.append(ItemResult(200, reply))
            except KvRouterError as error:
                results.append(refused(error))
            if position % UNINTERRUPTED_SELECTIONS == 0:
                await asyncio.sleep(0)
        return BatchReply(results)

    def progress(
        self, caller: Caller, batch: ReservationBatch
    ) -> BatchReply | Coroutine[Any, Any, BatchReply]:
        """Apply each step. Returns the reply, or a coroutine of it if the batch is long."""
        charge(self._guard, caller, len(batch.steps))
        if len(batch.steps) > UNINTERRUPTED_STEPS:
            return self._progress_slowly(caller, batch)
        return BatchReply(self._apply(caller, batch.steps, not batch.at_once))

    async def _progress_slowly(self, caller: Caller, batch: ReservationBatch) -> BatchReply:
        results = []
        for start in range(0, len(batch.steps), UNINTERRUPTED_STEPS):
            some = batch.steps[start : start + UNINTERRUPTED_STEPS]
            results += self._apply(caller, some, not batch.at_once)
            await asyncio.sleep(0)
        return BatchReply(results)

    def _apply(
        self, caller: Caller, steps: Iterable[msgspec.Raw], in_batch: bool
    ) -> list[ItemResult]:
        results = []
        for item in steps:
            try:
                step = command_of(decode_now(self._decode_step, bytes(item)), in_batch)
                self._commands.handle(step, caller)
                results.append(DONE)
            except KvRouterError as error:
                results.append(refused(error))
        return results


def refused(error: KvRouterError) -> ItemResult:
    """Return the result of an item that was refused."""
    return ItemResult(error.http_status, refused=error.body())


def command_of(step: ReservationStep, in_batch: bool) -> PrefillComplete | OutputBlock | Free:
    """Return the command of a step. Raises MissingRequestIdError, InvalidFieldError."""
    request_id = step.selection_id or step.request_id
    if request_id is None:
        raise MissingRequestIdError
    if step.step == "prefill_complete":
        return PrefillComplete(request_id, checked_usage(step.usage), in_batch)
    if step.step == "output_block":
        return OutputBlock(request_id, step.decay_fraction, in_batch)
    return Free(request_id, checked_usage(step.usage))
