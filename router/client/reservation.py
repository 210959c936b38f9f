"""A booked request, as its caller holds it."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from msgspec import structs

from router.client.calls import (
    OUTPUT_BLOCK,
    PREFILL_COMPLETE,
    RESERVE,
    Endpoint,
    Question,
    received_fields,
)
from router.client.progress_reports import Reports, Step
from router.errors import KvRouterError
from router.protocol.batches import ReservationStep
from router.protocol.batches import Step as StepName
from router.protocol.replies import Decision
from router.protocol.requests import (
    OutputBlockRequest,
    PrefillCompleteRequest,
    ReserveRequest,
    SelectRequest,
    Usage,
)
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError

log = logging.getLogger(__name__)

Chunk = TypeVar("Chunk")
Ask: TypeAlias = Callable[[Question[Any]], Awaitable[Any]]

_BOOKED_FIELDS = frozenset(field.encode_name for field in structs.fields(ReserveRequest))


UNHEARD_S = (0.1, 0.5, 2.0, 5.0)
"""Delays after which an end is reported again to a router that did not know the reservation."""


class Reservation:
    """A booked request, its `decision`, and its progress reports.

    If the router does not know it any more, for example after a restart, it is booked again.
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
        "_unreported",
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
        self._unreported = 0
        self.missed_reports = 0
        """Reports of `follow` that the router refused, or that the full queue dropped."""
        self.usage: Usage | None = None
        """The engine's usage report for the prompt; sent when the reservation is freed."""

    async def prefill_complete(self, usage: Usage | None = None) -> None:
        """Report that the prompt is computed. `usage`: the engine's usage report."""
        self._is_first_noted = True
        await self._send_report(PREFILL_COMPLETE, PrefillCompleteRequest(usage))
        self._is_prefilled = True

    async def output_block(self, decay_fraction: float | None = None) -> None:
        """Report that the output grew by a block; see `OutputBlockRequest`."""
        await self._send_report(OUTPUT_BLOCK, OutputBlockRequest(decay_fraction))

    async def follow(
        self, chunks: AsyncIterable[Chunk], tokens_of: Callable[[Chunk], int] = lambda _: 1
    ) -> AsyncIterator[Chunk]:
        """Yield the chunks of a response, and report the first token and every block.

        No chunk waits for the reports, and their errors do not end the response.

        `tokens_of`: the number of tokens in a chunk; one by default.
        """
        async for chunk in chunks:
            self.note_tokens(tokens_of(chunk))
            yield chunk

    def note_tokens(self, tokens: int) -> None:
        """Report `tokens` further tokens as `follow` does.

        For callers that pass a stream on themselves.
        """
        if not tokens:
            return
        if not self._is_first_noted:
            self._is_first_noted = True
            self._report(PREFILL_COMPLETE, "prefill_complete")
        blocks, self._filled_tokens = divmod(self._filled_tokens + tokens, self.decision.block_size)
        for _ in range(blocks):
            self._report(OUTPUT_BLOCK, "output_block")

    def keep(self) -> None:
        """Report that the request is still answered, for callers that see no tokens.

        Without any progress for long, the router would free it.
        """
        self._is_first_noted = True
        self._report(PREFILL_COMPLETE, "prefill_complete")

    def move(self, worker_id: int, dp_rank: int) -> asyncio.Task[None]:
        """Book the request on another rank, which serves it, and free the first booking.

        Returns the task of the booking, which may raise KvRouterError; then nothing is booked.
        """
        former = ReservationStep(step="free", request_id=self.request_id)
        self._reports.report(Step(former, lambda _: None, is_repeatable=True))
        self.request_id = f"{self.request_id[:240]}-moved"
        self.decision = structs.replace(self.decision, worker_id=worker_id, dp_rank=dp_rank)
        self._booking_again = asyncio.create_task(self._book_again())
        return self._booking_again

    def leave(self) -> asyncio.Future[None]:
        """Free the reservation, with `usage`.

        The returned future is done once the router has received it, or once it is given up; then
        the reservation expires.
        """
        if self._left is None:
            self._left = asyncio.get_running_loop().create_future()
            if self._booking_again is None:
                self._free()
            else:  # Book first, or the booking would arrive after its end.
                self._booking_again.add_done_callback(self._free)
        return self._left

    def _free(self, *_: object) -> None:
        self._reports.report(self._freeing())

    def _freeing(self) -> Step:
        step = ReservationStep(step="free", request_id=self.request_id, usage=self.usage)
        return Step(step, self._freed, is_repeatable=True)

    def _freed(self, error: KvRouterError | None) -> None:
        if isinstance(error, ReservationNotFoundError):
            self._free_later()
        elif error is not None:
            log.warning("%s not freed; it will expire: %s", self.request_id, error)
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    def _free_later(self) -> None:
        """Free the reservation again later: the router may not have received the booking yet."""
        if self._unreported < len(UNHEARD_S):
            self._reports.report_later(self._freeing(), UNHEARD_S[self._unreported])
            self._unreported += 1

    def _report(self, call: Endpoint[Any], name: StepName) -> None:
        if len(self._reports) >= self._most_reports:
            self.missed_reports += 1
            return

        def on_result(error: KvRouterError | None) -> None:
            self._note_result(call, error)

        step = ReservationStep(step=name, request_id=self.request_id)
        self._reports.report(Step(step, on_result, is_repeatable=call.is_repeatable))

    def _note_result(self, call: Endpoint[Any], error: KvRouterError | None) -> None:
        if error is None:
            self._is_prefilled |= call is PREFILL_COMPLETE
        elif isinstance(error, ReservationNotFoundError) and not self._is_ending:
            self._booking_again = asyncio.create_task(self._report_again(call))
        else:
            self.missed_reports += 1
            log.debug("%s of %s not reported: %s", call.name, self.request_id, error)

    @property
    def _is_ending(self) -> bool:
        """True if progress needs no report: the reservation was left, or is being booked again."""
        is_reported = self._booking_again is not None and not self._booking_again.done()
        return self._left is not None or is_reported

    async def _report_again(self, call: Endpoint[Any]) -> None:
        try:
            await self._send_report(call, {})
        except KvRouterError as error:
            self._note_result(call, error)
        else:
            self._is_prefilled |= call is PREFILL_COMPLETE

    async def _send_report(self, call: Endpoint[Any], content: Any) -> None:
        question = Question(call, content, self.request_id)
        try:
            await self._ask(question)
        except ReservationNotFoundError:
            await self._book_again()
            await self._ask(question)

    async def _book_again(self) -> None:
        """Book the reservation again on its rank, and report its progress so far."""
        prompt = {k: v for k, v in received_fields(self._request).items() if k in _BOOKED_FIELDS}
        decision = self.decision
        again = ReserveRequest(**prompt, worker_id=decision.worker_id, dp_rank=decision.dp_rank)
        with suppress(DuplicateReservationError):
            await self._ask(Question(RESERVE, again, self.request_id))
        if self._is_prefilled:
            await self._ask(Question(PREFILL_COMPLETE, {}, self.request_id))
