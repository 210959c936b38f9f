"""The router's client.

    async with RouterClient.over_http("http://127.0.0.1:8092") as router:
        async with router.reserve(SelectRequest(token_ids=prompt)) as reservation:
            stream = await complete(reservation.decision.endpoint, prompt)
            async for chunk in reservation.follow(stream):
                ...

The reservation is always freed: on leaving, on errors, on cancellation.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from random import Random, getrandbits
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET

from router.client.calls import (
    CAPACITY,
    FREE,
    LOADS,
    OUTPUT_BLOCK,
    OVERLAP_SCORES,
    POTENTIAL_LOADS,
    PREFILL_COMPLETE,
    REPORT,
    RESERVE,
    SELECT,
    SELECT_AND_RESERVE,
    SELECT_BATCH,
    Question,
    received_fields,
)
from router.client.http_transport import HttpTransport
from router.client.nats_transport import NatsTransport
from router.client.progress_reports import ProgressReports, Reports
from router.client.reservation import Reservation
from router.client.retry import RetryingCall, Transport
from router.client.settings import ClientSettings, Patience
from router.errors import KvRouterError
from router.protocol.batches import ItemResult, ReservationStep
from router.protocol.capacity import PoolCapacity
from router.protocol.replies import (
    Decision,
    LoadForecast,
    OverlapScoresReply,
    PotentialLoadsReply,
    ReservationReply,
    ScopeLoads,
)
from router.protocol.requests import (
    FreeRequest,
    OutputBlockRequest,
    PotentialLoadsRequest,
    PrefillCompleteRequest,
    PromptRequest,
    ReserveRequest,
    SelectRequest,
    Usage,
)
from router.runtime.security.nats_access import OPEN_ACCESS, NatsAccess
from router.sequence.active.errors import ReservationNotFoundError

if TYPE_CHECKING:  # clients of other processes do not import the core
    from router.api.commands import Commands

log = logging.getLogger(__name__)

T = TypeVar("T")

GOODBYES_S = (0.0, 0.25, 1.0)
"""Delays before a doubtful booking is freed: a busy router may process messages out of order."""


class RouterClient:
    """A client of a router. Calls raise the router's own errors, or UnansweredError.

    Bookings without a `request_id` get one, which stays the same over all attempts.
    """

    def __init__(
        self,
        transport: Transport,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 - frozen
        token: str | None = None,
        reports: Reports | None = None,
    ) -> None:
        """Initialise on a transport. `reports`: how progress reaches the router; in calls of it."""
        self._transport = transport
        self._settings = settings
        self._own_headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._random = Random()
        self._goodbyes: set[asyncio.Task[None]] = set()
        if reports is None:
            reports = ProgressReports(self._report, settings.retries, self._random)
        self._reports: Reports = reports

    @classmethod
    @asynccontextmanager
    async def over_http(
        cls,
        url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 - frozen
    ) -> AsyncIterator["RouterClient"]:
        """Yield a client of the router at a URL.

        `tls`: verifies the router's certificate over https, and contains the client's own.
        """
        async with HttpTransport.connected(url, tls) as transport:
            client = cls(transport, settings, token)
            try:
                yield client
            finally:
                await client.finish()

    @classmethod
    @asynccontextmanager
    async def over_nats(
        cls,
        url: str,
        namespace: str = "default",
        *,
        token: str | None = None,
        access: NatsAccess = OPEN_ACCESS,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 - frozen
    ) -> AsyncIterator["RouterClient"]:
        """Yield a client of the routers of a namespace. Waits until NATS is connected."""
        async with NatsTransport.connected(url, namespace, access) as transport:
            client = cls(transport, settings, token)
            try:
                yield client
            finally:
                await client.finish()

    @classmethod
    @asynccontextmanager
    async def in_process(
        cls,
        commands: "Commands",
        *,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 - frozen
    ) -> AsyncIterator["RouterClient"]:
        """Yield a client of the router in this process, which calls its commands directly.

        It may do all that a token with the scopes `route`, `loads` and `metrics` may.
        """
        from router.client.direct_transport import DirectReports, DirectTransport

        client = cls(DirectTransport(commands), settings, reports=DirectReports(commands))
        try:
            yield client
        finally:
            await client.finish()

    async def select(self, request: SelectRequest) -> Decision:
        """Select a rank without booking it."""
        return await self._send(Question(SELECT, request, request.request_id))

    async def select_batch(self, requests: Iterable[SelectRequest]) -> list[ItemResult]:
        """Select a rank for each of at most 256 requests; return the decision or error of each."""
        fields = {"requests": [received_fields(request) for request in requests]}
        return (await self._send(Question(SELECT_BATCH, fields))).results

    async def loads(self) -> list[ScopeLoads]:
        """Return the booked load of every rank."""
        return await self._send(Question(LOADS))

    async def capacity(self) -> list[PoolCapacity]:
        """Return the demand on each pool of workers, and its supply."""
        return await self._send(Question(CAPACITY))

    async def potential_loads(self, request: PotentialLoadsRequest) -> LoadForecast:
        """Return the load of every rank if this prompt were placed there."""
        reply = await self._send(Question(POTENTIAL_LOADS, request))
        if isinstance(reply, PotentialLoadsReply):
            return LoadForecast(reply.loads, () if reply.warnings is UNSET else reply.warnings)
        return reply

    async def overlap_scores(self, request: PromptRequest) -> OverlapScoresReply:
        """Return the cached prefix on every rank."""
        return await self._send(Question(OVERLAP_SCORES, request))

    @asynccontextmanager
    async def reserve(self, request: SelectRequest) -> AsyncIterator[Reservation]:
        """Select a rank, book it, and free it on leaving."""
        reservation = await self.reserved(request)
        try:
            yield reservation
        finally:
            await asyncio.shield(reservation.leave())

    # ── For callers that manage reservations themselves ──────────────────────────────────────────

    async def reserved(self, request: SelectRequest) -> Reservation:
        """Select a rank and book it. The caller must `leave` the reservation."""
        request_id = _id_of(request)
        asking = self._asking(Question(SELECT_AND_RESERVE, request, request_id))
        try:
            decision = await asking.answer(self._settings.retries, self._random)
        except BaseException:
            if asking.is_doubtful:
                self._flush(request_id)
            raise
        most_reports = self._settings.follow_reports
        return Reservation(self._send, self._reports, request_id, request, decision, most_reports)

    async def select_and_reserve(self, request: SelectRequest) -> Decision:
        """Select a rank and book it, until it is freed or expires."""
        return await self._send(Question(SELECT_AND_RESERVE, request, _id_of(request)))

    async def book(self, request: ReserveRequest) -> ReservationReply:
        """Book a rank that the caller chose."""
        return await self._send(Question(RESERVE, request, _id_of(request)))

    async def prefill_complete(self, request_id: str, usage: Usage | None = None) -> None:
        """Report that a booked prompt is computed."""
        await self._send(Question(PREFILL_COMPLETE, PrefillCompleteRequest(usage), request_id))

    async def output_block(self, request_id: str, decay_fraction: float | None = None) -> None:
        """Report that the output of a booked request grew by a block.

        Sent again only if no router can have received it.
        """
        await self._send(Question(OUTPUT_BLOCK, OutputBlockRequest(decay_fraction), request_id))

    async def report(self, steps: Iterable[ReservationStep]) -> list[ItemResult]:
        """Report at most 4,096 steps of many requests; return the result of each.

        Between two reports the router estimates the output that the engines have generated.
        """
        fields = {"steps": [received_fields(step) for step in steps]}
        return (await self._send(Question(REPORT, fields))).results

    async def free(self, request_id: str, usage: Usage | None = None) -> bool:
        """Report that a booked request ended. Returns False if it is unknown to the router."""
        try:
            await self._send(Question(FREE, FreeRequest(usage), request_id))
        except ReservationNotFoundError:
            return False
        return True

    async def finish(self) -> None:
        """Wait until every reservation that was left is freed, or will expire."""
        if self._goodbyes:
            await asyncio.wait(self._goodbyes)
        await self._reports.finish()

    async def _send(self, question: Question[T]) -> T:
        return await self._asking(question).answer(self._settings.retries, self._random)

    def _asking(self, question: Question[T]) -> RetryingCall[T]:
        settings, wait_s = self._settings, None
        if question.call.books:
            wait_s = getattr(question.content, "max_wait_s", None)
            wait_s = settings.max_wait_s if wait_s is None else wait_s
        patience = Patience(settings.timeout_s, wait_s or 0.0)
        return RetryingCall(self._transport, question, self._headers_of, patience)

    def _headers_of(self, question: Question[Any]) -> dict[str, str]:
        headers = {**self._own_headers, **self._settings.headers()}
        header_id = question.header_id
        if header_id is not None:
            headers["x-request-id"] = header_id
        return headers

    async def _report(self, steps: Sequence[ReservationStep]) -> list[ItemResult]:
        """Report steps as they happen. They are sent together only to lower the cost."""
        fields = [received_fields(step) for step in steps]
        return (await self._send(Question(REPORT, {"steps": fields, "at_once": True}))).results

    def _flush(self, request_id: str) -> None:
        """Free a booking that may exist, or may still be made by a delayed request."""
        task = asyncio.create_task(self._goodbye(request_id))
        self._goodbyes.add(task)
        task.add_done_callback(self._goodbyes.discard)

    async def _goodbye(self, request_id: str) -> None:
        try:
            for pause_s in GOODBYES_S:
                await asyncio.sleep(pause_s)
                if await self.free(request_id):
                    return
        except KvRouterError as error:
            log.warning("%s not freed; it will expire: %s", request_id, error)


def _id_of(request: SelectRequest | ReserveRequest) -> str:
    """Return a request's own id, or a new one."""
    return request.request_id or f"{getrandbits(128):032x}"
