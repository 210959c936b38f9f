"""Futures of queued requests, by ticket.

commands ─expect─▶ future ◀─admit─ core.admit, whenever a rank may have become free
                          ◀─refuse─ requests that waited too long, or were displaced by others
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

from router.api.errors import DrainingError
from router.core.admission import Admission
from router.core.commands import Admit, Free, Withdraw
from router.core.core import RouterCore
from router.core.effects import Effect
from router.core.placement import Placement
from router.errors import KvRouterError
from router.observability.metrics import RouterMetrics
from router.runtime.process.errors import ClientGoneError
from router.sequence.active.errors import ReservationNotFoundError

Disconnected: TypeAlias = Callable[[], Awaitable[None]]
"""A coroutine function that returns once the caller has disconnected."""

ADMITTED_AT_ONCE = 16
"""Requests placed without a pause; takes a few milliseconds."""


class PendingRequests:
    """The queued requests. `perform` executes the effects of placing them."""

    def __init__(
        self, core: RouterCore, perform: Callable[[Iterable[Effect]], None], metrics: RouterMetrics
    ) -> None:
        self._core = core
        self._perform = perform
        self._metrics = metrics
        self._futures: dict[int, asyncio.Future[Placement]] = {}
        self._is_closed = False

    def expect(self, ticket: int) -> asyncio.Future[Placement]:
        """Return a new future for a ticket."""
        future = self._futures[ticket] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            self._send_away(ticket)
        return future

    def close(self) -> None:
        """Refuse all queued requests and all later ones, because the router drains."""
        self._is_closed = True
        for ticket in tuple(self._futures):
            self._send_away(ticket)

    def refuse(self, ticket: int, error: KvRouterError) -> None:
        """End the wait of a request with an error."""
        future = self._futures.pop(ticket, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def admit(self) -> None:
        """Place the requests that the core admits; a long queue takes several loop iterations."""
        for _ in range(ADMITTED_AT_ONCE):
            now_s = time.monotonic()
            admission = self._core.handle(Admit(), now_s)[0]
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
        gone: Disconnected | None,
    ) -> Placement:
        """Wait for a queued request and return its placement.

        Raises the error that it is refused with, or ClientGoneError once `gone` returns. A request
        without a caller is withdrawn.
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
        self._metrics.wait_seconds.labels(admission.policy_class).observe(admission.waited_s)
        future = self._futures.pop(admission.ticket, None)
        if future is not None and not future.done():
            future.set_result(admission.outcome)

    def _send_away(self, ticket: int) -> None:
        self._core.handle(Withdraw(ticket), 0.0)
        self.refuse(ticket, DrainingError())

    def _take_back(self, request_id: str, ticket: int, future: asyncio.Future[Placement]) -> None:
        """Withdraw a request without a caller, or free it if it has just been placed."""
        self._metrics.withdrawn.inc()
        self._futures.pop(ticket, None)
        if (
            self._core.handle(Withdraw(ticket), 0.0)[0]
            or not future.done()
            or future.exception() is not None
        ):
            return
        with suppress(ReservationNotFoundError):
            self._perform(self._core.handle(Free(request_id), time.monotonic())[1])
