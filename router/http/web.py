"""What every HTTP interface does around its handlers: route, read bodies, refuse, count.

Bodies are JSON and checked by msgspec; FastAPI routes, documents and serves. Every refusal has the
same shape, `{"error": …, "code": …}` and the error's own fields.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.routing import Route as Served

from router.body_errors import UnsupportedMediaTypeError
from router.core import RouterCore
from router.dump_views import block_sizes, dump_pieces
from router.dumping import dumped
from router.errors import KvRouterError
from router.http.answers import refusal, warned
from router.http.openapi import ABOUT, document, extra
from router.http.routes import Ready, Route
from router.metrics import RouterMetrics
from router.prediction_views import Misprediction, sentence
from router.process.bodies import JsonReader, read_body
from router.protocol.values import Rank
from router.security.caller import ANYBODY, Caller
from router.service_config import ServiceConfig
from router.status import ServiceStatus
from router.worker_views import WorkerView

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")

_MOST_SENTENCES = 3
"""Of mispredictions; the others are beside them."""


class Web:
    """One set of routes."""

    def __init__(
        self, title: str, routes: Sequence[Route], config: ServiceConfig, metrics: RouterMetrics
    ) -> None:
        self._title = title
        self._routes = routes
        self._config = config
        self._metrics = metrics
        self._readers: dict[Any, JsonReader[Any]] = {
            route.body: JsonReader(route.body) for route in routes if route.body is not None
        }

    def reconfigure(self, config: ServiceConfig) -> None:
        """Go on with other limits."""
        self._config = config

    def app(self, handlers: object) -> FastAPI:
        """The application; a route's handler is the method of that name."""
        app = FastAPI(title=self._title, version="0.1.0", description=ABOUT, redoc_url=None)
        self.add_routes(app, handlers)
        app.add_exception_handler(HTTPException, self._unrouted)
        document(app, self._routes)
        return app

    def add_routes(self, app: FastAPI, handlers: object, *, is_documented: bool = True) -> None:
        """Serve these routes there; in OpenAPI, or without a word about them."""
        for route in self._routes:
            handler = _elsewhere if route.is_hot else getattr(handlers, route.handler)
            app.add_api_route(
                route.path,
                self._answering(route.path, handler),
                methods=[route.method],
                name=route.handler,
                summary=route.summary,
                openapi_extra=extra(route) if is_documented else None,
                include_in_schema=is_documented,
            )

    async def body(self, request: Request, body_type: type[T]) -> T:
        """The checked body of a request. Raises what is wrong with it."""
        content_type = request.headers.get("content-type")
        if (content_type or "").partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMediaTypeError(content_type)
        limits = (self._config.body_limit_bytes, self._config.body_timeout_s)
        body = await read_body(request.stream(), *limits)
        reader: JsonReader[T] = self._readers[body_type]
        request.state.unknown = []
        return await reader.read(body, request.state.unknown)

    def _answering(self, path: str, handler: Handler) -> Handler:
        """The handler, its refusals turned into answers, its answers counted."""

        async def answer(request: Request) -> Response:
            try:
                response = await handler(request)
                unknown = getattr(request.state, "unknown", ())
                if unknown:
                    self._metrics.unknown_fields.labels("http", path).inc(len(unknown))
                    body = warned(bytes(response.body), unknown)
                    response = json_bytes(body, response.status_code)
            except KvRouterError as error:
                self._metrics.refusals.labels("http", error.code).inc()
                refused = refusal(error)
                response = json_bytes(refused.body, refused.status)
                response.raw_headers.extend(refused.headers)
            self._metrics.requests.count("http", path, response.status_code)
            return response

        return answer

    async def _unrouted(self, request: Request, error: Exception) -> Response:
        """What the framework refuses before a handler sees it."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        code = {404: "route_not_found", 405: "method_not_allowed"}.get(status, "refused")
        self._metrics.refusals.labels("http", code).inc()
        answer = json_answer({"error": code.replace("_", " "), "code": code}, status)
        if status == 405:
            answer.headers["allow"] = ", ".join(_methods_at(request))
        return answer


def _methods_at(request: Request) -> list[str]:
    """What may be done where something else was tried."""
    routes = [each for each in request.app.routes if isinstance(each, Served)]
    found = (each for each in routes if each.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in found for method in route.methods or ()})


async def _elsewhere(_: Request) -> Response:
    """Stands for a route that the front answers: it is documented here, and has other methods
    refused.
    """
    raise HTTPException(404)


def caller_of(request: Request) -> Caller:
    """Who asks, as the guard has found."""
    caller: Caller = getattr(request.state, "caller", ANYBODY)
    return caller


def ready_answer(
    status: ServiceStatus,
    core: RouterCore,
    workers: list[WorkerView] | None = None,
    mispredicted: Sequence[Misprediction] = (),
) -> Response:
    """Whether the process can be relied on: 200, or 503 with the reasons."""
    readiness = status.readiness(core)
    degraded = [*readiness.degraded, *map(sentence, mispredicted[:_MOST_SENTENCES])]
    body = Ready(
        ready=readiness.is_ready,
        reason="; ".join(readiness.reasons) or None,
        degraded="; ".join(degraded) or None,
        schedulable_workers=core.fleet.schedulable_count(),
        workers=UNSET if workers is None else workers,
        mispredicted=list(mispredicted) or UNSET,
    )
    return json_answer(body, 200 if readiness.is_ready else 503)


async def dump_answer(core: RouterCore, only: Rank | None = None) -> Response:
    """Every held block, or a rank's: read in slices, then encoded on other threads while it is
    sent.
    """
    pieces = dump_pieces(await dumped(core), block_sizes(core), only)
    return StreamingResponse(pieces, media_type="application/json")


def json_answer(value: Any, status: int = 200) -> Response:
    """A value, as JSON."""
    return json_bytes(msgspec.json.encode(value), status)


def json_bytes(content: bytes, status: int = 200) -> Response:
    """JSON that is encoded already."""
    return Response(content, status, media_type="application/json")
