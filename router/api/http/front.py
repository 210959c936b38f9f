"""The service of HTTP requests: hot routes below ASGI, all others by the FastAPI application.

    hot request ─▶ DirectProtocol ─▶ admission ─▶ body, within limits ─▶ Front.answer ─▶ handler
    any other   ─▶ uvicorn ─▶ Front.__call__ ─▶ admission ─▶ the FastAPI application

Refusals have the shape of `router/api/http/answers.py`.
"""

from collections.abc import Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.http.answers import Response, error_response, log_refusal, warned
from router.api.http.hot_routes import BEFORE_ID, FindRoute, Later
from router.errors import KvRouterError
from router.observability.metrics import RouterMetrics
from router.runtime.http_server.admission import Admission, AdmissionLimits
from router.runtime.http_server.config import BodyConfig, HttpServerConfig
from router.runtime.http_server.exchange import (
    JSON_PAIR,
    Exchange,
    FirstLines,
    RequestHeads,
    split,
)
from router.runtime.http_server.write_batch import WriteBatch
from router.runtime.process.errors import ClientGoneError
from router.runtime.process.request_ids import ANSWERED, RequestIds
from router.runtime.security.guard import Guard


class Front:
    """The root application. `app` serves all routes but the hot ones, which `find` returns."""

    def __init__(
        self,
        app: ASGIApp,
        http: HttpServerConfig,
        bodies: BodyConfig,
        metrics: RouterMetrics,
        guard: Guard,
        find: FindRoute,
    ) -> None:
        self._app = app
        self.find = find
        self._metrics = metrics
        self._requests = metrics.requests
        self.admission = Admission(guard, _limits(http, bodies))
        self.heads = RequestHeads(BEFORE_ID)
        self.lines = FirstLines()
        self.writes = WriteBatch(self.admission.overload)

    def reconfigure(self, http: HttpServerConfig, bodies: BodyConfig) -> None:
        """Apply changed limits."""
        self.admission.limits = _limits(http, bodies)

    # ── Hot routes ───────────────────────────────────────────────────────────────────────────────

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        """Answer a hot request, at once or by the returned coroutine. Raises KvRouterError."""
        answer = exchange.head.route.handler(exchange)
        if isinstance(answer, Response):
            self._send(exchange, answer)
            return None
        return self._finish(exchange, answer)

    async def _finish(self, exchange: Exchange, later: Later) -> None:
        self._send(exchange, await later)

    def _send(self, exchange: Exchange, answer: Response) -> None:
        path = exchange.head.route.path
        if exchange.unknown:
            self._metrics.unknown_fields.labels("http", path).inc(len(exchange.unknown))
            answer = warned(answer, exchange.unknown)
        counted, number = self._requests.numbers, ("http", path, answer.status)
        counted[number] = counted.get(number, 0) + 1  # a call costs twice as much
        ids = exchange.ids
        if ids.given is not None or ids.traceparent is not None:
            exchange.own_lines = ids.lines()
        exchange.json(answer.body, answer.status, answer.headers)

    def refused(self, exchange: Exchange, error: KvRouterError) -> None:
        """Count and log a refusal."""
        self._metrics.refusals.labels("http", error.code).inc()
        self._requests.count("http", exchange.head.route.path, error.http_status)
        log_refusal(error)
        exchange.own_lines = exchange.ids.lines()

    def abandoned(self, exchange: Exchange) -> None:
        """Count a request whose client has disconnected."""
        self.refused(exchange, ClientGoneError())

    def error_reply(self, error: KvRouterError) -> tuple[int, object]:
        """Return the status and the body of an error response."""
        return error.http_status, error.body()

    # ── Other routes ─────────────────────────────────────────────────────────────────────────────

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of the FastAPI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ids = split(scope["headers"])[1].ids()
        ANSWERED.set(ids)
        self.admission.in_flight += 1
        try:
            await self._serve(scope, receive, _adding(_pairs_of(ids), send))
        finally:
            self.admission.in_flight -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.admission.check(scope)
        except KvRouterError as error:
            self._metrics.refusals.labels("http", error.code).inc()
            answer = error_response(error)
            self._requests.count("http", "", answer.status)
            length = (b"content-length", b"%d" % len(answer.body))
            headers = [JSON_PAIR, length, *answer.headers]
            start = {"type": "http.response.start", "status": answer.status, "headers": headers}
            await send(start)
            await send({"type": "http.response.body", "body": answer.body})
        else:
            await self._app(scope, receive, send)


def _limits(http: HttpServerConfig, bodies: BodyConfig) -> AdmissionLimits:
    return AdmissionLimits(http.max_requests, bodies.body_limit_bytes, bodies.body_timeout_s)


def _pairs_of(ids: RequestIds) -> tuple[tuple[bytes, bytes], ...]:
    """Return the caller's ids, if any, as response headers."""
    return tuple((name.encode(), value.encode()) for name, value in ids.answered().items())


def _adding(pairs: tuple[tuple[bytes, bytes], ...], send: Send) -> Send:
    """Return a `send` that adds headers to the response."""
    if not pairs:
        return send

    async def send_with_ids(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *pairs]}
        await send(message)

    return send_with_ids
