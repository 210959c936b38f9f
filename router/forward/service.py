"""The process of `kv-router forward`: an OpenAI endpoint, and its connection to a router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

from msgspec import structs
from prometheus_client import CollectorRegistry

from router.client import RouterClient
from router.forward.config import EppConfig, ForwardConfig
from router.forward.endpoint import OpenAiEndpoint, client_settings
from router.forward.metrics import ForwardMetrics
from router.runtime.process.loading import Loaded
from router.runtime.process.metrics import expose
from router.runtime.process.reload import Outcome
from router.runtime.process.request_ids import ANSWERED, TRACEPARENT
from router.runtime.security.edge import EDGE_METRICS, Edge
from router.runtime.security.nats_access import nats_access

if TYPE_CHECKING:  # few processes follow a cluster
    from router.discovery.kubernetes.pool_watch import PoolWatch


class ForwardService:
    """A forwarder process. `run` returns after `stop` is set and everything is closed."""

    def __init__(self, config: ForwardConfig) -> None:
        self._config = config
        self._edge = Edge(config.security)
        self.metrics = ForwardMetrics()
        expose(self.metrics.registry, "kv_router_", EDGE_METRICS, self._edge)
        self._pool = _pool_of(config, self.metrics.registry)
        self._endpoint = OpenAiEndpoint(config, self._edge, self.metrics, self._pool)

    def reconfigure(self, loaded: Loaded[ForwardConfig]) -> None:
        """Apply changed settings, those of `settings.LIVE`."""
        self._edge.reconfigure(loaded.config.security)
        self._endpoint.reconfigure(loaded.config)

    def reloaded(self, outcome: Outcome) -> list[str]:
        """See `Edge.reloaded`."""
        return self._edge.reloaded(outcome)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then finish open requests, and close. Raises ConfigError."""
        with self._endpoint.listening() as listener:
            async with self._router() as router:
                tasks = [self._edge.run()]
                if self._pool is not None:
                    tasks.append(self._pool.run(lambda: None))
                await self._endpoint.serve(stop, listener, router, tasks)

    @asynccontextmanager
    async def _router(self) -> AsyncIterator[RouterClient]:
        config = self._config.router
        settings = structs.replace(client_settings(self._config), headers=_trace_headers)
        options = config.access.options("router", config.router_url)
        token = options.get("headers", {}).get("authorization", "").removeprefix("Bearer ") or None
        if config.nats_url:
            access = nats_access(self._config.nats, config.nats_url)
            over_nats = RouterClient.over_nats(
                config.nats_url, config.namespace, token=token, access=access, settings=settings
            )
            async with over_nats as router:
                yield router
            return
        over_http = RouterClient.over_http(
            config.router_url, token=token, tls=options["verify"], settings=settings
        )
        async with over_http as router:
            yield router


def _pool_of(config: ForwardConfig, registry: CollectorRegistry) -> "PoolWatch | None":
    """Return the InferencePool whose picker this is, or None. Raises ConfigError."""
    if not isinstance(config, EppConfig) or not config.cluster.epp_pool:
        return None
    from router.discovery.kubernetes.pool_watch import PoolWatch
    from router.discovery.kubernetes.watching import PREFIX, WATCH_METRICS

    pool = PoolWatch(config.cluster, Random())
    expose(registry, PREFIX, WATCH_METRICS, pool.watches)
    return pool


def _trace_headers() -> dict[str, str]:
    """Return this process's span of the current request as headers, if the client sent a trace."""
    ids = ANSWERED.get()
    return {} if ids is None or ids.span is None else {TRACEPARENT: str(ids.span)}
