"""What else clients see: the models, and what every process of ours answers."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from router.errors import KvRouterError
from router.forward.call import refusal
from router.forward.completions import Completions
from router.forward.errors import MethodNotAllowedError, RouteNotFoundError
from router.forward.headers import REQUEST_ID, Pairs
from router.forward.metrics import ForwardMetrics
from router.forward.models import Models
from router.security.errors import TooManyRequestsError
from router.security.guard import Guard
from router.security.guarded import admit, refusal_headers

_JSON = b"application/json"

Answer: TypeAlias = tuple[int, bytes, bytes]
"""Its status, what kind of body it has, and the body."""

Handler: TypeAlias = Callable[[], Awaitable[Answer]]

ROUTES = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "GET /v1/models",
    "GET /health",
    "GET /ready",
    "GET /metrics",
)

_METHODS = {
    path: ("GET", "HEAD") if method == "GET" else (method,)
    for method, path in (route.split() for route in ROUTES)
}


class ForwardApp:
    """The ASGI application; `completions` answers those, below ASGI."""

    def __init__(
        self,
        completions: Completions,
        models: Models,
        metrics: ForwardMetrics,
        guard: Guard,
    ) -> None:
        self.completions = completions
        self._models = models
        self._metrics = metrics
        self._guard = guard
        self._handlers: dict[str, Handler] = {
            "GET /v1/models": self._list_models,
            "GET /health": self._health,
            "GET /ready": self._ready,
            "GET /metrics": self._tell_metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Answer one request."""
        assert scope["type"] == "http"
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # which has no body
        route = f"{method} {scope['path']}"
        self._metrics.in_flight += 1
        headers: Pairs = ()
        try:
            status, kind, body = await self._answer(route, method, scope)
            ended = "answered"
        except KvRouterError as error:
            self._metrics.refusals.labels(error.code).inc()
            ended = "refused" if error.http_status < 500 else "failed"
            status, kind, body = error.http_status, _JSON, msgspec.json.encode(refusal(error))
            headers = refusal_headers(error)
            if isinstance(error, MethodNotAllowedError):
                headers += ((b"allow", ", ".join(error.methods).encode()),)
        finally:
            self._metrics.in_flight -= 1
        self._metrics.requests.count(route if route in self._handlers else "", ended)
        await _send(send, status, [(b"content-type", kind), *headers, *_id_of(scope)], body)

    async def _answer(self, route: str, method: str, scope: Scope) -> Answer:
        path = scope["path"]
        is_open = self._guard.is_open(method, path)
        most = self.completions.config.max_requests
        if self._metrics.in_flight > most and not is_open:
            raise TooManyRequestsError(most)
        admit(self._guard, method, path, scope["headers"])
        handler = self._handlers.get(route)
        if handler is None:
            if path in _METHODS:
                raise MethodNotAllowedError(f"{scope['method']} {path}", _METHODS[path])
            raise RouteNotFoundError(route, ROUTES)
        return await handler()

    async def _list_models(self) -> Answer:
        return _json(await self._models.listed())

    async def _health(self) -> Answer:
        return _json({"status": "ok"})

    async def _ready(self) -> Answer:
        reason = await self._models.unready_reason()
        body: dict[str, object] = {"ready": reason is None, "reason": reason}
        body |= self.completions.tokenizers()
        return _json(body, 200 if reason is None else 503)

    async def _tell_metrics(self) -> Answer:
        return 200, CONTENT_TYPE_LATEST.encode(), self._metrics.exposition()


def _json(value: Any, status: int = 200) -> Answer:
    return status, _JSON, msgspec.json.encode(value)


def _id_of(scope: Scope) -> Pairs:
    return [pair for pair in scope["headers"] if pair[0] == REQUEST_ID]


async def _send(send: Send, status: int, headers: Pairs, body: bytes) -> None:
    pairs = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
