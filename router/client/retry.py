"""The retry policy of one call.

| what happens | sent again |
|---|---|
| no router can have received it | yes |
| no response, and it may have been executed | if executing it twice is harmless |
| the same, for a booking | yes; if it is then a duplicate, ours is freed first |
| refused, with a time to retry | yes, at that time |
| refused for its objectives | no: they are from the first attempt on |
| refused otherwise | no: another attempt would be refused too |
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from router.client.calls import FREE, Question
from router.client.errors import UnansweredError
from router.client.settings import Patience, Retries
from router.errors import KvRouterError
from router.scheduler.errors import SloNotMetError
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError

T = TypeVar("T")


HeadersOf: TypeAlias = Callable[[Question[Any]], dict[str, str]]
"""Returns the headers of a call, for transports that send them."""


class Transport(Protocol):
    """A connection to routers."""

    async def send(self, question: Question[T], headers: HeadersOf, patience: Patience) -> T:
        """Send one attempt; return the response. Raises the router's errors and UnansweredError."""
        ...


class RetryingCall(Generic[T]):
    """A call with retries. `is_doubtful`: an attempt without a response may have been executed."""

    def __init__(
        self,
        transport: Transport,
        question: Question[T],
        headers: HeadersOf,
        patience: Patience,
    ) -> None:
        self._transport = transport
        self._question = question
        self._headers = headers
        self._patience = patience
        self.is_doubtful = False

    async def answer(self, retries: Retries, random: Random) -> T:
        """Return the response. Raises the last attempt's error, or UnansweredError."""
        attempt = 1
        while True:
            try:
                return await self._transport.send(self._question, self._headers, self._patience)
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
        return error.retry_after_s is not None and not isinstance(error, SloNotMetError)

    async def _took_back(self) -> bool:
        """Free the booking of an attempt without a response. Returns False if that fails too."""
        freeing = Question(FREE, request_id=self._question.request_id)
        try:
            patience = Patience(self._patience.timeout_s)
            await self._transport.send(freeing, self._headers, patience)
        except ReservationNotFoundError:
            pass
        except KvRouterError:
            return False
        self.is_doubtful = False
        return True
