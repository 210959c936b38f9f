"""A request's way: placed by the router, sent to that engine, its answer passed on as it comes.

    place, book ─▶ ask the engine ─▶ head ─▶ first piece ─▶ … ─▶ end ─▶ freed
        ▲               │ no answer, or a refusal that another may not give
        └── without it ─┘

Whatever happens, the booking is freed: `RouterClient.reserve` frees it on leaving.
"""

import time
from typing import Any

import msgspec
from msgspec import Struct

from router.client import Reservation, RouterClient, Usage
from router.errors import InvalidFieldError, NoEndpointsError
from router.forward.answering import ClientSide
from router.forward.bodies import Asked
from router.forward.errors import NoWorkerLeftError, WorkerFailedError
from router.forward.events import EventSplitter, EventTooLargeError
from router.forward.headers import Pairs, to_client, to_engine
from router.forward.metrics import Ended, ForwardMetrics
from router.forward.placing import elsewhere
from router.forward.stream import EngineErrorEvent, StreamState, Wanted
from router.http_client import Answer, HttpPool, Origin, Request, UpstreamError
from router.protocol.replies import Decision
from router.protocol.requests import SelectRequest

ANOTHER_MAY_TAKE = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Refusals of one engine, of which others know nothing."""

NOT_ITS_FAULT = frozenset((408, 425, 429))
REFUSAL_LIMIT_BYTES = 1024 * 1024
_EVENTS = b"text/event-stream"


class PushSettings(Struct, frozen=True):
    """How patient, and how often. `authorization`: ours for engines; None: the client's."""

    max_attempts: int
    idle_s: float
    answer_limit_bytes: int
    authorization: bytes | None = None


class RefusedError(WorkerFailedError):
    """An engine refused, and what it said of it."""

    def __init__(self, decision: Decision, answer: Answer, body: bytes) -> None:
        status = answer.status
        is_its_fault = status not in NOT_ITS_FAULT
        super().__init__(decision.worker_id, f"status {status}", is_its_fault=is_its_fault)
        self.answer = answer
        self.decision = decision
        self.content = body


class _UsageOnly(Struct, frozen=True):
    usage: Usage | None = None


_usage = msgspec.json.Decoder(_UsageOnly).decode


class Push:
    """Forwards requests."""

    def __init__(
        self, router: RouterClient, pool: HttpPool, settings: PushSettings, metrics: ForwardMetrics
    ) -> None:
        self.router = router
        self.pool = pool
        self.settings = settings
        self.metrics = metrics

    async def forward(
        self, asked: Asked, headers: Pairs, request: SelectRequest, request_id: str, c: ClientSide
    ) -> Ended:
        """Answer a request. Raises what it was refused with, if nothing was said yet."""
        return await _Way(self, asked, headers, request, request_id, c).go()


class _Way:
    """One request on its way."""

    def __init__(
        self,
        push: Push,
        asked: Asked,
        headers: Pairs,
        request: SelectRequest,
        request_id: str,
        client: ClientSide,
    ) -> None:
        self._push = push
        self._asked = asked
        self._headers = headers
        self._request = request
        self._request_id = request_id
        self._client = client
        self._begun_s = time.monotonic()
        self._attempts = 0
        self._failed: set[int] = set()
        wanted = Wanted(bool(asked.read.return_token_ids), asked.wants_usage)
        self._stream = StreamState(wanted)

    async def go(self) -> Ended:
        """Until it is answered. Raises KvRouterError."""
        last: WorkerFailedError | None = None
        while True:
            try:
                return await self._attempt()
            except NoEndpointsError:
                if last is None:
                    raise
                return await self._give_up(last)
            except WorkerFailedError as error:
                last = error
                if not self._may_go_elsewhere(error):
                    return await self._give_up(error)

    async def _attempt(self) -> Ended:
        began_s = time.monotonic()
        async with self._push.router.reserve(elsewhere(self._request, self._failed)) as booked:
            self._push.metrics.deciding.observe(time.monotonic() - began_s)
            self._attempts += 1
            try:
                ended = await self._ask(booked)
            finally:
                self._push.metrics.missed_reports.inc(booked.missed_reports)
        self._push.metrics.attempts.labels("answered").inc()
        return ended

    def _may_go_elsewhere(self, error: WorkerFailedError) -> bool:
        self._push.metrics.attempts.labels("failed" if error.is_its_fault else "refused").inc()
        self._failed.add(error.worker_id)
        is_free = self._request.pinned_worker is None and not self._client.has_started
        return is_free and self._attempts < self._push.settings.max_attempts

    async def _give_up(self, error: WorkerFailedError) -> Ended:
        """An engine's refusal is the client's answer. Raises NoWorkerLeftError."""
        if isinstance(error, RefusedError) and not self._client.has_started:
            headers = to_client(error.answer.headers, error.decision, self._attempts)
            await self._client.whole(error.answer.status, headers, error.content)
            return "passed_on"
        left = NoWorkerLeftError(self._attempts, str(error))
        if not self._client.has_started:
            raise left from error
        await self._client.refuse(left)
        return "broke_off"

    async def _ask(self, booked: Reservation) -> Ended:
        decision = booked.decision
        try:
            origin = Origin.of(decision.endpoint)
            async with self._push.pool.asked(origin, self._to_engine(decision)) as answer:
                return await self._pass_on(answer, booked)
        except (UpstreamError, EventTooLargeError, EngineErrorEvent) as error:
            raise WorkerFailedError(decision.worker_id, str(error)) from error
        except InvalidFieldError as error:
            raise WorkerFailedError(decision.worker_id, str(error)) from error

    def _to_engine(self, decision: Decision) -> Request:
        fields: dict[str, Any] = {}
        if self._asked.is_stream:
            fields["stream_options"] = {"include_usage": True}
        authorization = self._push.settings.authorization
        headers = to_engine(self._headers, decision, self._request_id, authorization)
        body = self._asked.to_engine(**fields)
        return Request("POST", self._asked.path, body, headers, is_repeatable=True)

    async def _pass_on(self, answer: Answer, booked: Reservation) -> Ended:
        decision, settings = booked.decision, self._push.settings
        if 300 <= answer.status < 400:
            # Whereto is nobody's business: it would be a way around the router.
            raise WorkerFailedError(decision.worker_id, f"a redirect ({answer.status})")
        if answer.status in ANOTHER_MAY_TAKE:
            said = await answer.read(REFUSAL_LIMIT_BYTES, settings.idle_s)
            raise RefusedError(decision, answer, said)
        kind = answer.header(b"content-type") or b""
        if kind.startswith(_EVENTS) and answer.header(b"content-encoding") is None:
            return await self._pass_on_events(answer, booked)
        body = await answer.read(settings.answer_limit_bytes, settings.idle_s)
        self._saw_first()
        if answer.status == 200:
            booked.usage = _usage_in(body)
        headers = to_client(answer.headers, decision, self._attempts)
        await self._client.whole(answer.status, headers, body)
        return "answered" if answer.status < 400 else "passed_on"

    async def _pass_on_events(self, answer: Answer, booked: Reservation) -> Ended:
        splitter, stream, client = EventSplitter(), self._stream, self._client
        async for data in answer.chunks(self._push.settings.idle_s):
            shown, tokens = [], 0
            for event in splitter.feed(data):
                seen, more = stream.take(event)
                shown.append(seen)
                tokens += more
            booked.note_tokens(tokens)
            if shown:
                await self._show(b"".join(shown), answer, booked.decision)
        booked.usage = stream.usage
        if not stream.is_finished:
            raise WorkerFailedError(booked.decision.worker_id, "ended in the middle of a stream")
        await client.finish()
        return "answered"

    async def _show(self, data: bytes, answer: Answer, decision: Decision) -> None:
        client = self._client
        if not client.has_started:
            self._saw_first()
            await client.start(200, to_client(answer.headers, decision, self._attempts))
        if data:
            await client.write(data)

    def _saw_first(self) -> None:
        self._push.metrics.first_token.observe(time.monotonic() - self._begun_s)


def _usage_in(body: bytes) -> Usage | None:
    try:
        return _usage(body).usage
    except msgspec.MsgspecError:
        return None
