"""HTTP of an agent beside an engine: probes, metrics, and what it holds to be true."""

from collections.abc import Callable, Sequence

from msgspec import Struct
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from worker_agent.bridged_rank import BridgedRank
from worker_agent.http import Handler, dump_response, json_response, metrics_response


class Readiness(Struct, frozen=True):
    """`ready`, with the reasons against it; `degraded`: what is wrong although it is ready."""

    ready: bool
    reasons: list[str]
    degraded: list[str]


class BridgeServer:
    """The handlers. `read_*` say how things stand when they are asked."""

    def __init__(
        self,
        worker_id: int,
        read_ranks: Callable[[], Sequence[BridgedRank]],
        read_readiness: Callable[[], Readiness],
        registry: CollectorRegistry,
    ) -> None:
        self._worker_id = worker_id
        self._read_ranks = read_ranks
        self._read_readiness = read_readiness
        self._registry = registry

    def app(self) -> Starlette:
        """The application."""
        routes: tuple[tuple[str, Handler], ...] = (
            ("/health", self.health),
            ("/ready", self.ready),
            ("/metrics", self.metrics),
            ("/dump", self.dump),
        )
        return Starlette(routes=[Route(path, handler) for path, handler in routes])

    async def health(self, _: Request) -> Response:
        """The process lives, whatever becomes of engine and bus."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Routers know of the engine; 503 with reasons while they do not."""
        readiness = self._read_readiness()
        return json_response(readiness, 200 if readiness.ready else 503)

    async def metrics(self, _: Request) -> Response:
        """Prometheus metrics."""
        return metrics_response(self._registry)

    async def dump(self, _: Request) -> Response:
        """Every block that the engine holds, by rank and tier, as routers are told."""
        return dump_response(self._worker_id, self._read_ranks())
