"""HTTP: handlers read bytes, call a command, and encode what it answers.

Bodies are JSON and checked by msgspec; FastAPI routes, documents and serves. Every refusal has the
same shape, `{"error": …, "code": …}` and the error's own fields.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from router import views
from router.commands import REQUEST_ID_HEADER, Commands, request_id_of
from router.config import RouterConfig
from router.errors import (
    KvRouterError,
    UnsupportedMediaTypeError,
    WorkerNotFoundError,
)
from router.metrics import RouterMetrics
from router.openapi import ROUTES, document, extra
from router.process.bodies import decode_body, read_body
from router.protocol.catalogue import Lifecycle, RouterAnnouncement
from router.protocol.requests import (
    OutputBlockRequest,
    PromptRequest,
    ReserveRequest,
    SelectRequest,
    WorkerPatch,
)
from router.status import ServiceStatus

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
Booking = TypeVar("Booking", SelectRequest, ReserveRequest)
T = TypeVar("T")

_OK = b'{"status":"ok"}'


class Api:
    """The handlers, on one set of commands.

    `order_worker` writes an operator's order; `routers` lists who serves this namespace.
    """

    def __init__(
        self,
        config: RouterConfig,
        commands: Commands,
        status: ServiceStatus,
        metrics: RouterMetrics,
        order_worker: Callable[[int, Lifecycle], Awaitable[None]],
        routers: Callable[[], list[RouterAnnouncement]],
    ) -> None:
        self._config = config
        self._commands = commands
        self._status = status
        self._metrics = metrics
        self._order_worker = order_worker
        self._routers = routers
        self._decoders: dict[Any, Callable[[bytes], Any]] = {
            route.body: msgspec.json.Decoder(route.body).decode
            for route in ROUTES
            if route.body is not None
        }

    def app(self) -> FastAPI:
        """The application, with every route of `router/openapi.py`."""
        app = FastAPI(title="kv-router", version="0.1.0", redoc_url=None)
        for route in ROUTES:
            handler: Handler = getattr(self, route.handler)
            app.add_api_route(
                route.path,
                self._answering(route.path, handler),
                methods=[route.method],
                name=route.handler,
                summary=route.summary,
                openapi_extra=extra(route),
            )
        app.add_exception_handler(HTTPException, self._unrouted)
        document(app)
        return app

    async def select(self, request: Request) -> Response:
        """Choose a rank."""
        body = _with_id(await self._body(request, SelectRequest), request)
        return _json(await self._commands.select(body))

    async def select_and_reserve(self, request: Request) -> Response:
        """Choose a rank and book it."""
        body = _with_id(await self._body(request, SelectRequest), request)
        return _json(await self._commands.select_and_reserve(body))

    async def reserve(self, request: Request) -> Response:
        """Book a rank the caller chose."""
        body = _with_id(await self._body(request, ReserveRequest), request)
        return _json(await self._commands.reserve(body), 201)

    async def prefill_complete(self, request: Request) -> Response:
        """A booked prompt is computed."""
        self._commands.prefill_complete(request.path_params["request_id"])
        return _json_bytes(_OK)

    async def output_block(self, request: Request) -> Response:
        """A booked request grew by a block."""
        body = await self._body(request, OutputBlockRequest)
        self._commands.output_block(request.path_params["request_id"], body.decay_fraction)
        return _json_bytes(_OK)

    async def free(self, request: Request) -> Response:
        """A booked request ended."""
        self._commands.free(request.path_params["request_id"])
        return _json_bytes(_OK)

    async def workers(self, _: Request) -> Response:
        """Every worker."""
        return _json(views.workers(self._commands.core, time.monotonic()))

    async def worker(self, request: Request) -> Response:
        """One worker."""
        return _json(self._worker_view(request.path_params["worker_id"]))

    async def patch_worker(self, request: Request) -> Response:
        """Cordon a worker, drain it, or let it serve again."""
        worker_id = request.path_params["worker_id"]
        body = await self._body(request, WorkerPatch)
        self._worker_view(worker_id)
        await self._order_worker(worker_id, body.lifecycle)
        return _json(self._worker_view(worker_id))

    async def routers(self, _: Request) -> Response:
        """Routers of this namespace."""
        return _json(self._routers())

    async def loads(self, _: Request) -> Response:
        """Booked load."""
        return _json(views.loads(self._commands.core))

    async def potential_loads(self, request: Request) -> Response:
        """Load, were a prompt placed."""
        body = await self._body(request, PromptRequest)
        return _json(await self._commands.potential_loads(body))

    async def overlap_scores(self, request: Request) -> Response:
        """Cached prefix of a prompt."""
        body = await self._body(request, PromptRequest)
        return _json(await self._commands.overlap_scores(body))

    async def dump(self, _: Request) -> Response:
        """Everything held."""
        return _json(views.dump(self._commands.core))

    async def health(self, _: Request) -> Response:
        """The process lives."""
        return _json_bytes(_OK)

    async def ready(self, _: Request) -> Response:
        """The process can be relied on."""
        readiness = self._status.readiness(self._commands.core)
        body = {
            "ready": readiness.is_ready,
            "reason": "; ".join(readiness.reasons) or None,
            "degraded": "; ".join(readiness.degraded) or None,
            "schedulable_workers": self._commands.core.fleet.schedulable_count(),
        }
        return _json(body, 200 if readiness.is_ready else 503)

    async def metrics(self, _: Request) -> Response:
        """Prometheus metrics."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    def _worker_view(self, worker_id: int) -> views.WorkerView:
        worker = self._commands.core.fleet.get(worker_id)
        if worker is None:
            raise WorkerNotFoundError(worker_id)
        return views.worker_view(self._commands.core, worker, time.monotonic())

    async def _body(self, request: Request, body_type: type[T]) -> T:
        content_type = request.headers.get("content-type")
        if (content_type or "").partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMediaTypeError(content_type)
        limits = (self._config.body_limit_bytes, self._config.body_timeout_s)
        body = await read_body(request.stream(), *limits)
        decoder: Callable[[bytes], T] = self._decoders[body_type]
        return await decode_body(decoder, body)

    def _answering(self, path: str, handler: Handler) -> Handler:
        """The handler, its refusals turned into answers, its answers counted."""

        async def answer(request: Request) -> Response:
            try:
                response = await handler(request)
            except KvRouterError as error:
                response = self._refusal(error)
            self._metrics.requests.labels("http", path, str(response.status_code)).inc()
            return response

        return answer

    def _refusal(self, error: KvRouterError) -> Response:
        self._metrics.refusals.labels("http", error.code).inc()
        return _json(error.body(), error.http_status)

    async def _unrouted(self, _: Request, error: Exception) -> Response:
        """What the framework refuses before a handler sees it."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        code = {404: "route_not_found", 405: "method_not_allowed"}.get(status, "refused")
        self._metrics.refusals.labels("http", code).inc()
        return _json({"error": code.replace("_", " "), "code": code}, status)


def _with_id(body: Booking, request: Request) -> Booking:
    """A booking whose id may be in the header."""
    request_id = request_id_of(body.request_id, request.headers.get(REQUEST_ID_HEADER))
    return msgspec.structs.replace(body, request_id=request_id)


def _json(value: Any, status: int = 200) -> Response:
    return _json_bytes(msgspec.json.encode(value), status)


def _json_bytes(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")
