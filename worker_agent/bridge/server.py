"""The HTTP server of an agent next to an engine: probes, metrics, its blocks and its tiers."""

from collections.abc import Callable, Sequence

from msgspec import UNSET, Struct, UnsetType
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.runtime.security.errors import ForbiddenError
from router.runtime.security.guarded import caller_of, is_detailed, shown_reason
from worker_agent.bridge.engine_tiers import EngineTiers
from worker_agent.bridge.rank import BridgedRank
from worker_agent.operations.http import TierRoutes
from worker_agent.process.http import (
    Handler,
    answering,
    dump_response,
    json_response,
    metrics_response,
)


class Readiness(Struct, frozen=True):
    """Readiness, with the reasons against it; `degraded` lists problems of a ready worker."""

    ready: bool
    reasons: list[str]
    degraded: list[str]


class Ready(Struct, frozen=True):
    """The response of `/ready`; `degraded` with `?verbose`, which needs the scope `admin`."""

    ready: bool
    reason: str | None
    degraded: list[str] | UnsetType = UNSET


class BridgeServer:
    """The handlers; the `read_*` functions return the current state."""

    def __init__(
        self,
        worker_id: int,
        read_ranks: Callable[[], Sequence[BridgedRank]],
        read_readiness: Callable[[], Readiness],
        registry: CollectorRegistry,
        tiers: EngineTiers | None = None,
    ) -> None:
        """Set up the handlers; `tiers`: None without a way to the engine's tiers."""
        self._worker_id = worker_id
        self._read_ranks = read_ranks
        self._read_readiness = read_readiness
        self._registry = registry
        self._tiers = tiers

    def app(self) -> Starlette:
        """Return the application."""
        routes: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/metrics", self.metrics),
            ("GET", "/dump", self.dump),
            *self._tier_routes(),
        )
        return Starlette(
            routes=[Route(path, answering(handler), methods=[m]) for m, path, handler in routes]
        )

    def _tier_routes(self) -> tuple[tuple[str, str, Handler], ...]:
        tiers = self._tiers
        if tiers is None:
            return ()

        async def blocksets(_: Request) -> Response:
            return json_response(await tiers.sharing())

        return ("GET", "/blocksets", blocksets), *TierRoutes(tiers).routes()

    async def health(self, _: Request) -> Response:
        """Respond that the process is alive, regardless of engine and bus."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Respond whether the worker is announced to routers; 503 with reasons otherwise."""
        caller = caller_of(request.scope)
        try:
            has_details = is_detailed(caller, request.scope["query_string"])
        except ForbiddenError as error:
            return json_response(error.body(), error.http_status)
        readiness = self._read_readiness()
        reason = shown_reason(caller, readiness.reasons)
        body = Ready(readiness.ready, reason, readiness.degraded if has_details else UNSET)
        return json_response(body, 200 if readiness.ready else 503)

    async def metrics(self, _: Request) -> Response:
        """Respond with Prometheus metrics."""
        return metrics_response(self._registry)

    async def dump(self, _: Request) -> Response:
        """Respond with all blocks of the engine, by rank and tier, as published to routers."""
        return dump_response(self._worker_id, self._read_ranks())
