"""The life of each placed request at a gateway, from its booking to its end. No answer is read.

    booked ─▶ response headers: the status, and the endpoint that served it ─▶ end: freed
                 └─ another endpoint than chosen: booked there

The end is that of the stream, or an entry of the gateway's access log (`epp_ends`). A booking whose
end is missed expires at the router, and is forgotten here.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial

from router.forward.errors import ANOTHER_MAY_TAKE, NOT_ITS_FAULT
from router.forward.picker.metrics import PickerMetrics
from router.forward.picker.placement import Placed
from router.forward.picker.pool import PoolEndpoint, PoolView
from router.forward.picker.stream import GatewayResponse
from router.forward.resilience.circuit_breaker import CircuitBreaker

log = logging.getLogger(__name__)

KEEP_S = 60.0
KEEPS_A_TTL = 3
"""Interval of reports that an answer is still under way: the router sees no tokens of it, and frees
reservations without progress (`reservation_ttl_s`). Of a shorter time there are that many in it, if
it is known. One that is freed all the same is booked again by the next report."""

SWEEP_S = 5.0

FORGET_S = 600.0
"""Time after the end of a stream after which the entry of an access log is expected no more."""

_ITS_FAULT = ANOTHER_MAY_TAKE - NOT_ITS_FAULT


class _PlacedRequest:
    __slots__ = ("endpoint", "has_answer", "kept_s", "left_s", "placed")

    def __init__(self, placed: Placed, now_s: float) -> None:
        self.placed = placed
        self.endpoint = placed.endpoint
        self.has_answer = False
        self.kept_s = now_s
        self.left_s: float | None = None


class PlacedRequests:
    """The placed requests by the ids of their bookings. `now_s`: a clock.

    `ends_by_log`: entries of access logs end them, in place of their streams. `ttl_s`: the time
    after which the router frees a booking without progress, if it is known.
    """

    __slots__ = ("_breaker", "_by_id", "_ends_by_log", "_keep_s", "_metrics", "_now_s", "_pool")

    def __init__(
        self,
        pool: PoolView,
        breaker: CircuitBreaker,
        metrics: PickerMetrics,
        now_s: Callable[[], float],
        *,
        ends_by_log: bool,
        ttl_s: float = math.inf,
    ) -> None:
        self._pool = pool
        self._breaker = breaker
        self._metrics = metrics
        self._now_s = now_s
        self._ends_by_log = ends_by_log
        self._keep_s = min(KEEP_S, ttl_s / KEEPS_A_TTL)
        self._by_id: dict[str, _PlacedRequest] = {}

    @property
    def count(self) -> int:
        """The number of requests."""
        return len(self._by_id)

    def begin(self, booking_id: str, placed: Placed) -> None:
        """Add a placed request."""
        self._by_id[booking_id] = _PlacedRequest(placed, self._now_s())

    def answered(self, booking_id: str, response: GatewayResponse) -> None:
        """Note that an answer has begun, and book the request where it is served."""
        request = self._by_id.get(booking_id)
        if request is None:
            return
        request.has_answer = True
        served = response.served
        if served is not None and served != request.endpoint.address:
            self._move(request, served)
        if request.placed.prefill is not None:
            request.placed.prefill.leave()  # the decode worker has fetched its blocks
        note = self._breaker.failed if response.status in _ITS_FAULT else self._breaker.succeeded
        note(request.endpoint.worker_id, request.endpoint.url, self._now_s())

    def _move(self, request: _PlacedRequest, served: str) -> None:
        """Book a request on the endpoint that serves it instead of the chosen one."""
        endpoint = next((e for e in self._pool.endpoints() if e.address == served), None)
        if endpoint is None:
            self._metrics.served_elsewhere.labels("unknown").inc()
            return
        request.endpoint = endpoint
        booked = request.placed.booked
        if booked is None or _is_on(endpoint, booked.decision.worker_id, booked.decision.dp_rank):
            return
        moving = booked.move(endpoint.worker_id, endpoint.dp_rank or 0)
        moving.add_done_callback(partial(self._note_moved, booked.request_id, served))

    def _note_moved(self, request_id: str, served: str, moving: asyncio.Task[None]) -> None:
        error = None if moving.cancelled() else moving.exception()
        outcome = "moved" if error is None else "failed"
        self._metrics.served_elsewhere.labels(outcome).inc()
        if error is not None:
            log.warning("%s is served by %s and not booked there: %s", request_id, served, error)

    def leave(self, booking_id: str) -> None:
        """Note the end of a request's stream."""
        request = self._by_id.get(booking_id)
        if request is None:
            return
        if self._ends_by_log and request.placed.booked is not None:
            request.left_s = self._now_s()
        else:
            self._end(booking_id)

    def logged(self, booking_id: str | None) -> None:
        """Note an entry of an access log: the request has ended."""
        is_known = booking_id is not None and booking_id in self._by_id
        # Without its stream, an entry is the only sign of an end; it may come before the stream's.
        outcome = "unnamed" if booking_id is None else "ended" if is_known else "not_booked"
        self._metrics.access_log_entries.labels(outcome).inc()
        if is_known and booking_id is not None and self._ends_by_log:
            self._end(booking_id)

    @property
    def sweep_s(self) -> float:
        """The interval at which `sweep` is due."""
        return min(SWEEP_S, self._keep_s / 2)

    def sweep(self) -> None:
        """Keep the bookings of long answers, and forget those whose end was missed. O(requests)."""
        now_s = self._now_s()
        for booking_id, request in list(self._by_id.items()):
            booked = request.placed.booked
            if request.left_s is not None and now_s - request.left_s >= FORGET_S:
                self._end(booking_id)
            elif (
                request.has_answer and booked is not None and now_s - request.kept_s >= self._keep_s
            ):
                request.kept_s = now_s
                booked.keep()

    def end_all(self) -> None:
        """Free every booking, at shutdown."""
        for booking_id in list(self._by_id):
            self._end(booking_id)

    def _end(self, booking_id: str) -> None:
        request = self._by_id.pop(booking_id)
        for booked in (request.placed.booked, request.placed.prefill):
            if booked is not None:
                booked.leave()


def _is_on(endpoint: PoolEndpoint, worker_id: int, dp_rank: int) -> bool:
    """Return whether an endpoint is that of a rank."""
    return endpoint.worker_id == worker_id and endpoint.dp_rank in (None, dp_rank)
