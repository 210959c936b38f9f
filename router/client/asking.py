"""One question, asked as often as that is safe and sensible.

| what happens | asked again |
|---|---|
| nobody can have heard it | yes |
| no answer, and it may have been done | if doing it twice is as good as once |
| the same, of a booking | yes; if it then is a duplicate, that was ours: freed first |
| refused, and the router says when to ask again | then |
| refused otherwise | no: asking again would not help |
"""

import asyncio
from random import Random
from typing import Generic, TypeVar

from router.client.calls import FREE, Question
from router.client.errors import UnansweredError
from router.client.settings import Patience, Retries
from router.client.transport import Transport
from router.errors import DuplicateReservationError, KvRouterError, ReservationNotFoundError

T = TypeVar("T")


class Asking(Generic[T]):
    """A question on its way. `is_doubtful`: an attempt without an answer may have been done."""

    def __init__(
        self,
        transport: Transport,
        question: Question[T],
        headers: dict[str, str],
        patience: Patience,
    ) -> None:
        self._transport = transport
        self._question = question
        self._headers = headers
        self._patience = patience
        self.is_doubtful = False

    async def answer(self, retries: Retries, random: Random) -> T:
        """The answer. Raises what the last attempt was refused with, or UnansweredError."""
        attempt = 1
        while True:
            try:
                return await self._transport.ask(self._question, self._headers, self._patience)
            except asyncio.CancelledError:
                self.is_doubtful = True
                raise
            except KvRouterError as error:
                self.is_doubtful |= isinstance(error, UnansweredError) and error.is_maybe_done
                pause_s = retries.pause_s(attempt, error.retry_after_s, random)
                if pause_s is None or not await self._may_again(error):
                    raise
            await asyncio.sleep(pause_s)
            attempt += 1

    async def _may_again(self, error: KvRouterError) -> bool:
        if isinstance(error, UnansweredError):
            return self._question.call.is_repeatable or not error.is_maybe_done
        if isinstance(error, DuplicateReservationError):
            return self._question.call.books and self.is_doubtful and await self._took_back()
        return error.retry_after_s is not None

    async def _took_back(self) -> bool:
        """Free what an attempt without an answer has booked; False if nobody answers now either."""
        freeing = Question(FREE, request_id=self._question.request_id)
        try:
            patience = Patience(self._patience.timeout_s)
            await self._transport.ask(freeing, self._headers, patience)
        except ReservationNotFoundError:
            pass
        except KvRouterError:
            return False
        self.is_doubtful = False
        return True
