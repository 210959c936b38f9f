"""Callers whose requests wait in the core, each by its ticket.

commands ─expect─▶ future ◀─admit─ core.admit, whenever a rank may have become free
                          ◀─refuse─ who waited too long, or had to go for others
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

from router.admitter import Admission
from router.body_errors import ClientGoneError
from router.core import RouterCore
from router.effects import Effect
from router.errors import KvRouterError, ReservationNotFoundError
from router.metrics import RouterMetrics
from router.placement import Placement
from router.queue_errors import DrainingError

Gone: TypeAlias = Callable[[], Awaitable[None]]
"""Returns when whoever waits has hung up."""

ADMITTED_AT_ONCE = 16
"""Requests placed without a pause: some milliseconds at most."""


class Waiters:
    """Who waits. `perform` carries out the effects of placing them."""

    def __init__(
        self, core: RouterCore, perform: Callable[[Iterable[Effect]], None], metrics: RouterMetrics
    ) -> None:
        self._core = core
        self._perform = perform
        self._metrics = metrics
        self._futures: dict[int, asyncio.Future[Placement]] = {}
        self._is_closed = False

    def expect(self, ticket: int) -> asyncio.Future[Placement]:
        """Somebody waits for this ticket from now on."""
        future = self._futures[ticket] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            self._send_away(ticket)
        return future

    def close(self) -> None:
        """Nobody waits here any more."""
        self._is_closed = True
        for ticket in tuple(self._futures):
            self._send_away(ticket)

    def refuse(self, ticket: int, error: KvRouterError) -> None:
        """A request waits no more, and was not placed."""
        future = self._futures.pop(ticket, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def admit(self) -> None:
        """Place whom the core places; a long row in several turns of the loop."""
        for _ in range(ADMITTED_AT_ONCE):
            now_s = time.monotonic()
            admission = self._core.admit(now_s)
            if admission is None:
                return
            self._settle(admission)
            self._perform(admission.effects)
        asyncio.get_running_loop().call_soon(self.admit)

    async def placement(
        self,
        request_id: str,
        ticket: int,
        future: asyncio.Future[Placement],
        gone: Gone | None,
    ) -> Placement:
        """Where a waiting request was placed. Raises what it is refused with, or ClientGoneError
        once `gone` returns; a request that nobody waits for any more is taken back.
        """
        watching = None if gone is None else asyncio.ensure_future(gone())
        awaited: set[asyncio.Future[Any]] = {future} if watching is None else {future, watching}
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._take_back(request_id, ticket, future)
            raise
        finally:
            is_gone = watching is not None and watching.done()
            if watching is not None:
                watching.cancel()
        if is_gone:
            self._take_back(request_id, ticket, future)
            raise ClientGoneError
        return future.result()

    def _settle(self, admission: Admission) -> None:
        if isinstance(admission.outcome, KvRouterError):
            self.refuse(admission.ticket, admission.outcome)
            return
        self._metrics.waiting.seconds.labels(admission.policy_class).observe(admission.waited_s)
        future = self._futures.pop(admission.ticket, None)
        if future is not None and not future.done():
            future.set_result(admission.outcome)

    def _send_away(self, ticket: int) -> None:
        self._core.withdraw(ticket)
        self.refuse(ticket, DrainingError())

    def _take_back(self, request_id: str, ticket: int, future: asyncio.Future[Placement]) -> None:
        """Nobody waits for this request any more; it may have been placed this moment."""
        self._metrics.waiting.withdrawn.inc()
        self._futures.pop(ticket, None)
        if self._core.withdraw(ticket) or not future.done() or future.exception() is not None:
            return
        with suppress(ReservationNotFoundError):
            self._perform(self._core.free(request_id, time.monotonic()))
