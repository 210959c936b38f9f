"""The forwarder's other routes: the model list, health, readiness and metrics."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from router.client import RouterClient
from router.errors import KvRouterError
from router.forward.apis.api import APIS
from router.forward.apis.passed import PASSED
from router.forward.completions import Completions
from router.forward.cors import Cors
from router.forward.errors import (
    MethodNotAllowedError,
    ModelNotFoundError,
    RouteNotFoundError,
    error_response,
)
from router.forward.headers import REQUEST_ID, Pairs
from router.forward.kept_routes import KEPT_ROUTES
from router.forward.metrics import ForwardMetrics
from router.forward.picker.pool import ClusterPool
from router.forward.resilience.model_names import ModelName, names_in
from router.runtime.security.guarded import caller_of, is_detailed, refusal_headers


class Models:
    """Queries the router for models at each request."""

    def __init__(self, router: RouterClient, routing_group: str) -> None:
        self._router = router
        self._routing_group = routing_group
        self._began = int(time.time())

    async def listed(self) -> dict[str, object]:
        """Return the models in OpenAI's format. Raises KvRouterError."""
        names = sorted((await self._names()).values(), key=lambda each: each.name)
        return {"object": "list", "data": [self._card(each) for each in names]}

    async def one(self, name: str) -> dict[str, object]:
        """Return one model in OpenAI's format. Raises ModelNotFoundError, KvRouterError."""
        names = await self._names()
        if name not in names:
            raise ModelNotFoundError(name, sorted(names))
        return self._card(names[name])

    def _card(self, name: ModelName) -> dict[str, object]:
        """Return a card like an engine's, without its files: `root` is the model of a name."""
        card: dict[str, object] = {
            "id": name.name,
            "object": "model",
            "created": self._began,
            "owned_by": "kv-router",
            "root": name.model if name.lora_name is None else name.name,
            "parent": None if name.lora_name is None else name.model,
            "permission": [],
        }
        return card if name.max_tokens is None else {**card, "max_model_len": name.max_tokens}

    async def _names(self) -> dict[str, ModelName]:
        found = names_in(await self._router.loads(), self._routing_group)
        return {each.name: each for each in found}


_JSON = b"application/json"

Answer: TypeAlias = tuple[int, bytes, bytes]
"""Status, content type and body."""

Handler: TypeAlias = Callable[[Scope], Awaitable[Answer]]

ROUTES = (
    *(f"POST {path}" for path in (*APIS, *PASSED)),
    *KEPT_ROUTES,
    "GET /v1/models",
    "GET /v1/models/{model:path}",
    "GET /",
    "GET /health",
    "GET /ready",
    "GET /metrics",
)

_MODEL = "/v1/models/"
"""The path of one model, before its name, which may contain slashes."""

_METHODS = {
    path: ("GET", "HEAD") if method == "GET" else (method,)
    for method, path in (route.split() for route in ROUTES)
}


class ForwardApp:
    """The ASGI application of all routes but completions, which `completions` serves below ASGI.

    `cluster`: the pool of a Kubernetes cluster that the picker of this process serves.
    """

    def __init__(
        self,
        completions: Completions,
        models: Models,
        metrics: ForwardMetrics,
        cors: Cors,
        cluster: ClusterPool | None = None,
    ) -> None:
        self.completions = completions
        self._cluster = cluster
        self._cors = cors
        self._models = models
        self._metrics = metrics
        self._admission = completions.admission
        self._handlers: dict[str, Handler] = {
            "GET /v1/models": self._list_models,
            "GET /v1/models/{model:path}": self._show_model,
            "GET /": self._health,  # agents ask for it at their start
            "GET /health": self._health,
            "GET /ready": self._ready,
            "GET /metrics": self._serve_metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Serve one request."""
        assert scope["type"] == "http"
        preflight = self._cors.preflight(scope["method"], scope["headers"])
        if preflight is not None:
            self._metrics.requests.count("", "answered")
            await _send(send, 204, preflight, b"")
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # no response body
        route = _route_of(method, scope["path"])
        self._admission.in_flight += 1
        headers: Pairs = ()
        try:
            status, kind, body = await self._answer(route, scope)
            ended = "answered"
        except KvRouterError as error:
            self._metrics.refusals.labels(error.code).inc()
            ended = "refused" if error.http_status < 500 else "failed"
            status, kind, body = (
                error.http_status,
                _JSON,
                msgspec.json.encode(error_response(error)),
            )
            headers = refusal_headers(error)
            if isinstance(error, MethodNotAllowedError):
                headers += ((b"allow", ", ".join(error.methods).encode()),)
        finally:
            self._admission.in_flight -= 1
        self._metrics.requests.count(route if route in self._handlers else "", ended)
        own = (*_id_of(scope), *self._cors.headers(_origin_of(scope)))
        await _send(send, status, [(b"content-type", kind), *headers, *own], body)

    async def _answer(self, route: str, scope: Scope) -> Answer:
        self._admission.check(scope)
        path, handler = scope["path"], self._handlers.get(route)
        if handler is None:
            declared = route.partition(" ")[2]
            if declared in _METHODS:
                raise MethodNotAllowedError(f"{scope['method']} {path}", _METHODS[declared])
            raise RouteNotFoundError(route, ROUTES)
        return await handler(scope)

    async def _list_models(self, _: Scope) -> Answer:
        return _json(await self._models.listed())

    async def _show_model(self, scope: Scope) -> Answer:
        return _json(await self._models.one(scope["path"].removeprefix(_MODEL)))

    async def _health(self, _: Scope) -> Answer:
        return _json({"status": "ok"})

    async def _ready(self, scope: Scope) -> Answer:
        problem = None if self._cluster is None else self._cluster.unready_reason()
        reason = problem or self.completions.unready_reason()
        body: dict[str, object] = {"ready": reason is None, "reason": reason}
        if is_detailed(caller_of(scope), scope["query_string"]):
            body |= self.completions.tokenizers()
        return _json(body, 200 if reason is None else 503)

    async def _serve_metrics(self, _: Scope) -> Answer:
        return 200, CONTENT_TYPE_LATEST.encode(), self._metrics.exposition()


def _route_of(method: str, path: str) -> str:
    """Return method and declared path."""
    is_model = len(path) > len(_MODEL) and path.startswith(_MODEL)
    return f"{method} {_MODEL}{{model:path}}" if is_model else f"{method} {path}"


def _json(value: Any, status: int = 200) -> Answer:
    return status, _JSON, msgspec.json.encode(value)


def _id_of(scope: Scope) -> Pairs:
    return [pair for pair in scope["headers"] if pair[0] == REQUEST_ID]


def _origin_of(scope: Scope) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == b"origin"), None)


async def _send(send: Send, status: int, headers: Pairs, body: bytes) -> None:
    length = [(b"content-length", b"%d" % len(body))] if status != 204 else []
    pairs = [*headers, *length]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
