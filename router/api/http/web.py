"""The common parts of every HTTP interface: routing, reading of bodies, errors, counting.

Bodies are JSON and checked by msgspec; FastAPI routes, documents and serves. All errors have one
shape, `{"error": …, "code": …}` and the error's own fields.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.routing import Route as Served

from router.api.http import answers
from router.api.http.answers import error_response, warned
from router.api.http.openapi import ABOUT, PAGE_HEADERS, docs_page, document
from router.api.http.routes import Ready, Route
from router.core.core import RouterCore
from router.core.views.accuracy import public_findings, sentence
from router.core.views.index import block_sizes, dump_pieces
from router.errors import KvRouterError
from router.ingest.snapshots import dumped
from router.observability.health import ServiceStatus
from router.observability.metrics import RouterMetrics
from router.protocol.replies import WARNINGS_HEADER
from router.protocol.values import Rank
from router.protocol.workers import WorkerView
from router.runtime.http_server.config import BodyConfig
from router.runtime.http_server.exchange import Exchange, HotRoute
from router.runtime.process.errors import UnsupportedMediaTypeError
from router.runtime.process.json_bodies import JsonReader, read_body
from router.runtime.security.guarded import is_detailed, shown_reason

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")

_MOST_SENTENCES = 3
"""Limit of mispredictions listed in `degraded`, and of workers in `reason`; the other fields have
all."""


class Web:
    """One set of routes."""

    def __init__(
        self, title: str, routes: Sequence[Route], bodies: BodyConfig, metrics: RouterMetrics
    ) -> None:
        self._title = title
        self._routes = routes
        self._bodies = bodies
        self._metrics = metrics
        self._readers: dict[Any, JsonReader[Any]] = {
            route.body: JsonReader(route.body) for route in routes if route.body is not None
        }

    def reconfigure(self, bodies: BodyConfig) -> None:
        """Apply changed limits."""
        self._bodies = bodies

    def app(self, handlers: object) -> FastAPI:
        """Return the application; a route's handler is the method of that name."""
        app = FastAPI(
            title=self._title, version="0.1.0", description=ABOUT, docs_url=None, redoc_url=None
        )
        self.add_routes(app, handlers)
        app.add_api_route("/docs", lambda: _docs_answer(app), include_in_schema=False)
        app.add_exception_handler(HTTPException, self._unrouted)
        document(app, self._routes)
        return app

    def add_routes(self, app: FastAPI, handlers: object, *, is_documented: bool = True) -> None:
        """Add these routes to an application, documented in OpenAPI or hidden."""
        for route in self._routes:
            handler = _elsewhere if route.is_hot else getattr(handlers, route.handler)
            app.add_api_route(
                route.path,
                self._answering(route.path, handler),
                methods=[route.method],
                name=route.handler,
                summary=route.summary,
                include_in_schema=is_documented,
            )

    async def body(self, request: Request, body_type: type[T]) -> T:
        """Return the checked body of a request. Raises the error of an invalid one."""
        content_type = request.headers.get("content-type")
        if (content_type or "").partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMediaTypeError(content_type)
        limits = (self._bodies.body_limit_bytes, self._bodies.body_timeout_s)
        body = await read_body(request.stream(), *limits)
        reader: JsonReader[T] = self._readers[body_type]
        request.state.unknown = []
        return await reader.read(body, request.state.unknown)

    def _answering(self, path: str, handler: Handler) -> Handler:
        """Return a handler that turns errors into responses and counts all responses."""

        async def answer(request: Request) -> Response:
            try:
                response = await handler(request)
                unknown = getattr(request.state, "unknown", ())
                if unknown:
                    self._metrics.unknown_fields.labels("http", path).inc(len(unknown))
                    response = _warned(response, unknown)
            except KvRouterError as error:
                self._metrics.refusals.labels("http", error.code).inc()
                response = as_starlette(error_response(error))
            self._metrics.requests.count("http", path, response.status_code)
            return response

        return answer

    async def _unrouted(self, request: Request, error: Exception) -> Response:
        """Return the response to an error of the framework, raised before a handler runs."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        code = {404: "route_not_found", 405: "method_not_allowed"}.get(status, "refused")
        self._metrics.refusals.labels("http", code).inc()
        answer = json_answer({"error": code.replace("_", " "), "code": code}, status)
        if status == 405:
            answer.headers["allow"] = ", ".join(_methods_at(request))
        return answer


def _docs_answer(app: FastAPI) -> Response:
    return Response(docs_page(app.openapi()), headers=PAGE_HEADERS, media_type="text/html")


def _methods_at(request: Request) -> list[str]:
    """Return the methods allowed at a path, for an unsupported one."""
    routes = [each for each in request.app.routes if isinstance(each, Served)]
    found = (each for each in routes if each.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in found for method in route.methods or ()})


async def _elsewhere(_: Request) -> Response:
    """Raise 404: a placeholder for a route that the front serves.

    It is documented here, and makes other methods respond with 405.
    """
    raise HTTPException(404)


class ReadyProbe:
    """`GET /ready`: 200, or 503 with the reasons.

    Without `?verbose` in O(1) for strangers, because any caller may send it. Operators also receive
    why workers are not chosen, if none is. `describe`: lists the workers.
    """

    def __init__(
        self,
        status: ServiceStatus,
        core: RouterCore,
        describe: Callable[[], list[WorkerView] | UnsetType] = lambda: UNSET,
    ) -> None:
        self._status = status
        self._core = core
        self._describe = describe
        self._route = HotRoute("/ready", self._answer)

    def find(self, method: str, path: str) -> HotRoute | None:
        """Return the route of a request, or None."""
        return self._route if path == "/ready" and method == "GET" else None

    def _answer(self, exchange: Exchange) -> answers.Response:
        """Return the response. Raises ForbiddenError if the caller may not see details."""
        caller, core = exchange.caller, self._core
        has_details = is_detailed(caller, exchange.head.query)
        readiness = self._status.readiness(core)
        reasons = readiness.reasons
        if caller.may("admin") and not core.fleet.schedulable_count():
            reasons = [*reasons, *self._unchosen()]
        body = Ready(readiness.is_ready, shown_reason(caller, reasons))
        if caller.may("admin"):
            body.schedulable_workers = core.fleet.schedulable_count()
        if has_details:
            found = public_findings(core.closed_loop, time.monotonic())
            degraded = [*self._status.degraded(core), *map(sentence, found[:_MOST_SENTENCES])]
            body.degraded = "; ".join(degraded) or None
            body.workers = self._describe()
            body.mispredicted = found or UNSET
            body.peers = self._status.peers() or UNSET
        return answers.response(body, 200 if readiness.is_ready else 503)

    def _unchosen(self) -> list[str]:
        """Return why workers are not chosen, at most a few sentences. O(workers)."""
        shown = self._describe()
        views = () if shown is UNSET else (each for each in shown if each.not_schedulable_reasons)
        return [
            f"worker {each.worker_id}: {'; '.join(each.not_schedulable_reasons)}"
            for each in islice(views, _MOST_SENTENCES)
        ]


async def dump_answer(core: RouterCore, only: Rank | None = None) -> Response:
    """Return every held block, or one rank's.

    Blocks are read in slices, then encoded on other threads while the response is sent.
    """
    pieces = dump_pieces(await dumped(core), block_sizes(core), only)
    return StreamingResponse(pieces, media_type="application/json")


def as_starlette(answer: answers.Response) -> Response:
    """Return a response as Starlette's."""
    response = json_bytes(answer.body, answer.status)
    response.raw_headers.extend(answer.headers)
    return response


def _warned(response: Response, unknown: Sequence[str]) -> Response:
    """Return a response with warnings about unknown fields as well."""
    headers = [each for each in response.raw_headers if each[0] == WARNINGS_HEADER]
    own = answers.Response(bytes(response.body), response.status_code, tuple(headers))
    return as_starlette(warned(own, unknown))


def json_answer(value: Any, status: int = 200) -> Response:
    """Return a response with a value as JSON."""
    return json_bytes(msgspec.json.encode(value), status)


def json_bytes(content: bytes, status: int = 200) -> Response:
    """Return a response with encoded JSON."""
    return Response(content, status, media_type="application/json")
