"""The OpenAI endpoint and the picker in a router's process: they call its commands directly."""

import asyncio
import socket
from contextlib import AbstractContextManager

from router.api.commands import Commands
from router.client import RouterClient
from router.config.router import RouterConfig
from router.forward.config import in_router
from router.forward.endpoint import OpenAiEndpoint, client_settings
from router.forward.metrics import ForwardMetrics
from router.forward.picker.pool import ClusterPool
from router.service.host import CoreHost


class RouterEndpoint:
    """The endpoint. Its guard, certificates and metrics are those of the router's own port.

    `cluster`: the pool of a Kubernetes cluster that the picker serves, or None.
    """

    __slots__ = ("_closed", "_commands", "_config", "_endpoint")

    def __init__(
        self,
        config: RouterConfig,
        host: CoreHost,
        commands: Commands,
        cluster: ClusterPool | None = None,
    ) -> None:
        self._config = in_router(config)
        self._commands = commands
        metrics = ForwardMetrics(host.metrics.registry)
        ttl_s = config.reservations.reservation_ttl_s
        self._endpoint = OpenAiEndpoint(self._config, host.edge, metrics, cluster, ttl_s)
        self._closed = asyncio.Event()

    def reconfigure(self, config: RouterConfig) -> None:
        """Apply changed settings, those of `settings.LIVE`."""
        self._endpoint.reconfigure(in_router(config))

    def listening(self) -> AbstractContextManager[socket.socket | None]:
        """Bind its ports. Yields that of clients, or None. Raises ConfigError."""
        return self._endpoint.listening("openai_port")

    async def run(self, stop: asyncio.Event, listener: socket.socket | None) -> None:
        """Serve until `stop` is set; then finish open requests, free their bookings, and close."""
        settings = client_settings(self._config)
        try:
            async with RouterClient.in_process(self._commands, settings=settings) as router:
                await self._endpoint.serve(stop, listener, router)
        finally:
            self._closed.set()

    async def until_closed(self) -> None:
        """Wait until `run` has ended: at most `drain_s` after `stop`, and the time to close."""
        await self._closed.wait()
