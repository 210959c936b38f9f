"""A booked request, as its caller holds it."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from msgspec import structs

from router.client.calls import (
    FREE,
    OUTPUT_BLOCK,
    PREFILL_COMPLETE,
    RESERVE,
    Call,
    Question,
    said,
    usage_fields,
)
from router.client.reports import Reports, Step
from router.errors import DuplicateReservationError, KvRouterError, ReservationNotFoundError
from router.protocol.replies import Decision
from router.protocol.requests import ReserveRequest, SelectRequest, Usage

log = logging.getLogger(__name__)

Chunk = TypeVar("Chunk")
Ask: TypeAlias = Callable[[Question[Any]], Awaitable[Any]]

_BOOKED_FIELDS = frozenset(field.encode_name for field in structs.fields(ReserveRequest))


UNHEARD_S = (0.1, 0.5, 2.0, 5.0)
"""Pauses after which a router that knew nothing of a reservation is told again that it ended."""


class Reservation:
    """Where a request was booked (`decision`), and how its router hears of its progress.

    A router that does not know it any more, because it was started again, say, is told of it anew.
    """

    __slots__ = (
        "_ask",
        "_booking_again",
        "_filled_tokens",
        "_is_first_noted",
        "_is_prefilled",
        "_left",
        "_most_reports",
        "_reports",
        "_request",
        "_unheard",
        "decision",
        "missed_reports",
        "request_id",
        "usage",
    )

    def __init__(
        self,
        ask: Ask,
        reports: Reports,
        request_id: str,
        request: SelectRequest,
        decision: Decision,
        most_reports: int,
    ) -> None:
        self.request_id = request_id
        self.decision = decision
        self._ask = ask
        self._reports = reports
        self._most_reports = most_reports
        self._request = request
        self._is_prefilled = self._is_first_noted = False
        self._filled_tokens = decision.isl_tokens % decision.block_size
        self._booking_again: asyncio.Task[None] | None = None
        self._left: asyncio.Future[None] | None = None
        self._unheard = 0
        self.missed_reports = 0
        """Reports of `follow` that the router did not take, or that came too thick."""
        self.usage: Usage | None = None
        """What the engine said of the prompt, once it has; told when the reservation is freed."""

    async def prefill_complete(self, usage: Usage | None = None) -> None:
        """The prompt is computed. `usage`: what the engine said of it."""
        self._is_first_noted = True
        await self._tell(PREFILL_COMPLETE, usage_fields(usage))
        self._is_prefilled = True

    async def output_block(self, decay_fraction: float | None = None) -> None:
        """The request grew by a block; see `OutputBlockRequest`."""
        fields = {} if decay_fraction is None else {"decay_fraction": decay_fraction}
        await self._tell(OUTPUT_BLOCK, fields)

    async def follow(
        self, chunks: AsyncIterable[Chunk], tokens_of: Callable[[Chunk], int] = lambda _: 1
    ) -> AsyncIterator[Chunk]:
        """The chunks of an answer, as they come; the router is told of the first token and of every
        block. No chunk waits for that, and nothing that goes wrong with it ends the answer.

        `tokens_of`: how many tokens a chunk has; one, unless said.
        """
        async for chunk in chunks:
            self.note_tokens(tokens_of(chunk))
            yield chunk

    def note_tokens(self, tokens: int) -> None:
        """So many tokens more have come: what `follow` tells the router of them, for those who pass
        a stream on themselves.
        """
        if not tokens:
            return
        if not self._is_first_noted:
            self._is_first_noted = True
            self._report(PREFILL_COMPLETE)
        blocks, self._filled_tokens = divmod(self._filled_tokens + tokens, self.decision.block_size)
        for _ in range(blocks):
            self._report(OUTPUT_BLOCK)

    def leave(self) -> asyncio.Future[None]:
        """It ended: have it freed, with `usage`. Done once the router has heard of it, or nobody
        listens; then it will expire.
        """
        if self._left is None:
            self._left = asyncio.get_running_loop().create_future()
            if self._booking_again is None:
                self._free()
            else:  # first, or it would be booked behind its end
                self._booking_again.add_done_callback(self._free)
        return self._left

    def _free(self, *_: object) -> None:
        self._reports.tell(self._freeing())

    def _freeing(self) -> Step:
        fields = self._step(FREE, usage_fields(self.usage))
        return Step(fields, self._freed, is_repeatable=True)

    def _freed(self, error: KvRouterError | None) -> None:
        if isinstance(error, ReservationNotFoundError):
            self._free_later()
        elif error is not None:
            log.warning("%s is not freed, and will expire: %s", self.request_id, error)
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    def _free_later(self) -> None:
        """Of several routers one may be asked that has not heard of the booking yet."""
        if self._unheard < len(UNHEARD_S):
            self._reports.tell_later(self._freeing(), UNHEARD_S[self._unheard])
            self._unheard += 1

    def _report(self, call: Call[Any]) -> None:
        if len(self._reports) >= self._most_reports:
            self.missed_reports += 1
            return

        def heard(error: KvRouterError | None) -> None:
            self._heard(call, error)

        fields = self._step(call, {})
        self._reports.tell(Step(fields, heard, is_repeatable=call.is_repeatable))

    def _heard(self, call: Call[Any], error: KvRouterError | None) -> None:
        if error is None:
            self._is_prefilled |= call is PREFILL_COMPLETE
        elif isinstance(error, ReservationNotFoundError) and not self._is_ending:
            self._booking_again = asyncio.create_task(self._tell_again(call))
        else:
            self.missed_reports += 1
            log.debug("%s of %s is not reported: %s", call.name, self.request_id, error)

    @property
    def _is_ending(self) -> bool:
        """Nobody needs to know any more, or somebody tells it already."""
        is_told = self._booking_again is not None and not self._booking_again.done()
        return self._left is not None or is_told

    async def _tell_again(self, call: Call[Any]) -> None:
        try:
            await self._tell(call, {})
        except KvRouterError as error:
            self._heard(call, error)
        else:
            self._is_prefilled |= call is PREFILL_COMPLETE

    def _step(self, call: Call[Any], fields: dict[str, Any]) -> dict[str, Any]:
        return {"step": call.name, "request_id": self.request_id, **fields}

    async def _tell(self, call: Call[Any], fields: dict[str, Any]) -> None:
        question = Question(call, fields, self.request_id)
        try:
            await self._ask(question)
        except ReservationNotFoundError:
            await self._book_again()
            await self._ask(question)

    async def _book_again(self) -> None:
        """Where it is, and as far as it is."""
        prompt = {k: v for k, v in said(self._request).items() if k in _BOOKED_FIELDS}
        place = {"worker_id": self.decision.worker_id, "dp_rank": self.decision.dp_rank}
        with suppress(DuplicateReservationError):
            await self._ask(Question(RESERVE, {**prompt, **place}, self.request_id))
        if self._is_prefilled:
            await self._ask(Question(PREFILL_COMPLETE, {}, self.request_id))
