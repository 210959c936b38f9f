"""The router's client.

    async with RouterClient.over_http("http://127.0.0.1:8092") as router:
        async with router.reserve(SelectRequest(token_ids=prompt)) as reservation:
            stream = await complete(reservation.decision.endpoint, prompt)
            async for chunk in reservation.follow(stream):
                ...

Whatever happens inside, the reservation is freed: on leaving, on errors, on cancellation.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from random import Random, getrandbits
from typing import Any, TypeVar

from router.client.asking import Asking
from router.client.calls import (
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
    said,
    usage_fields,
)
from router.client.http_transport import HttpTransport
from router.client.nats_transport import NatsTransport
from router.client.reports import Reports
from router.client.reservation import Reservation
from router.client.settings import ClientSettings, Patience
from router.client.transport import Transport
from router.errors import KvRouterError, ReservationNotFoundError
from router.protocol.batches import ItemResult, ReservationStep
from router.protocol.replies import (
    Decision,
    OverlapScoresReply,
    PotentialLoad,
    PotentialLoadsReply,
    ReservationReply,
    ScopeLoads,
)
from router.protocol.requests import PromptRequest, ReserveRequest, SelectRequest, Usage
from router.security.nats_access import OPEN_ACCESS, NatsAccess

log = logging.getLogger(__name__)

T = TypeVar("T")

GOODBYES_S = (0.0, 0.25, 1.0)
"""Pauses before what may still be booked is freed: a router that is busy hears things in any order.
"""


class RouterClient:
    """Asks a router. Raises what the router refuses with, as it was raised there, or
    UnansweredError.

    Requests to book without a `request_id` get one, which stays the same however often it is tried.
    """

    def __init__(
        self,
        transport: Transport,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 - frozen
        token: str | None = None,
    ) -> None:
        self._transport = transport
        self._settings = settings
        self._own_headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._random = Random()
        self._goodbyes: set[asyncio.Task[None]] = set()
        self._reports = Reports(self._report, settings.retries, self._random)

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
        """A client of the router at a URL. `tls`: with what https is checked, and who we are."""
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
        """A client of the routers of a namespace. Waits until NATS is there."""
        async with NatsTransport.connected(url, namespace, access) as transport:
            client = cls(transport, settings, token)
            try:
                yield client
            finally:
                await client.finish()

    async def select(self, request: SelectRequest) -> Decision:
        """Choose a rank; books nothing."""
        return await self._ask(Question(SELECT, said(request), request.request_id))

    async def select_batch(self, requests: Iterable[SelectRequest]) -> list[ItemResult]:
        """Choose a rank for each of these, at most 256: the answer or the refusal of each."""
        fields = {"requests": [said(request) for request in requests]}
        return (await self._ask(Question(SELECT_BATCH, fields))).results

    async def loads(self) -> list[ScopeLoads]:
        """The booked load of every rank."""
        return await self._ask(Question(LOADS))

    async def potential_loads(self, request: PromptRequest) -> list[PotentialLoad]:
        """The load of every rank, were this prompt placed there."""
        reply = await self._ask(Question(POTENTIAL_LOADS, said(request)))
        return reply.loads if isinstance(reply, PotentialLoadsReply) else reply

    async def overlap_scores(self, request: PromptRequest) -> OverlapScoresReply:
        """The cached prefix of every rank."""
        return await self._ask(Question(OVERLAP_SCORES, said(request)))

    @asynccontextmanager
    async def reserve(self, request: SelectRequest) -> AsyncIterator[Reservation]:
        """Choose a rank, book it, and free it on leaving."""
        reservation = await self.reserved(request)
        try:
            yield reservation
        finally:
            await asyncio.shield(reservation.leave())

    # ── For those who look after reservations themselves ─────────────────────────────────────────

    async def reserved(self, request: SelectRequest) -> Reservation:
        """Choose a rank and book it. Whoever gets it has to `leave` it."""
        request_id = _id_of(request)
        asking = self._asking(Question(SELECT_AND_RESERVE, said(request), request_id))
        try:
            decision = await asking.answer(self._settings.retries, self._random)
        except BaseException:
            if asking.is_doubtful:
                self._say_goodbye(request_id)
            raise
        most_reports = self._settings.follow_reports
        return Reservation(self._ask, self._reports, request_id, request, decision, most_reports)

    async def select_and_reserve(self, request: SelectRequest) -> Decision:
        """Choose a rank and book it, until it is freed or forgotten."""
        return await self._ask(Question(SELECT_AND_RESERVE, said(request), _id_of(request)))

    async def book(self, request: ReserveRequest) -> ReservationReply:
        """Book a rank that the caller chose."""
        return await self._ask(Question(RESERVE, said(request), _id_of(request)))

    async def prefill_complete(self, request_id: str, usage: Usage | None = None) -> None:
        """A booked prompt is computed."""
        await self._ask(Question(PREFILL_COMPLETE, usage_fields(usage), request_id))

    async def output_block(self, request_id: str, decay_fraction: float | None = None) -> None:
        """A booked request grew by a block. Tried again only where nobody can have heard it."""
        fields = {} if decay_fraction is None else {"decay_fraction": decay_fraction}
        await self._ask(Question(OUTPUT_BLOCK, fields, request_id))

    async def report(self, steps: Iterable[ReservationStep]) -> list[ItemResult]:
        """What became of many requests, at most 4,096 steps: how each went. Between two reports the
        router goes by what their engines should have generated.
        """
        fields = {"steps": [said(step) for step in steps]}
        return (await self._ask(Question(REPORT, fields))).results

    async def free(self, request_id: str, usage: Usage | None = None) -> bool:
        """A booked request ended; False if no router knew it (any more)."""
        try:
            await self._ask(Question(FREE, usage_fields(usage), request_id))
        except ReservationNotFoundError:
            return False
        return True

    async def finish(self) -> None:
        """Wait until every reservation that was left is freed, or given up to expire."""
        if self._goodbyes:
            await asyncio.wait(self._goodbyes)
        await self._reports.finish()

    async def _ask(self, question: Question[T]) -> T:
        return await self._asking(question).answer(self._settings.retries, self._random)

    def _asking(self, question: Question[T]) -> Asking[T]:
        headers = {**self._own_headers, **self._settings.headers()}
        header_id = question.header_id
        if header_id is not None:
            headers["x-request-id"] = header_id
        wait_s = 0.0
        if question.call.books:
            wait_s = question.fields.get("max_wait_s", self._settings.max_wait_s)
        patience = Patience(self._settings.timeout_s, wait_s)
        return Asking(self._transport, question, headers, patience)

    async def _report(self, steps: list[dict[str, Any]]) -> list[ItemResult]:
        """The steps as they happen, told together only because that is cheaper."""
        return (await self._ask(Question(REPORT, {"steps": steps, "at_once": True}))).results

    def _say_goodbye(self, request_id: str) -> None:
        """Free what may have been booked, or may still be: nobody knows when that is heard."""
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
            log.warning("%s is not freed, and will expire: %s", request_id, error)


def _id_of(request: SelectRequest | ReserveRequest) -> str:
    """A request's own id, or a new one."""
    return request.request_id or f"{getrandbits(128):032x}"
