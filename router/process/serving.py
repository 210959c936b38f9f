"""Running a process: its signals, its HTTP server inside its one TaskGroup."""

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from router.errors import ConfigError
from router.process.connections import HttpConfig, LimitedProtocol
from router.process.http_limits import HttpLimits
from router.process.moments import next_moment

SHUTDOWN_S = 5

TICK_S = 0.1
"""How often a server looks whether patience has ended; uvicorn's own."""

YOUNG_OBJECTS = 20_000
"""More new objects than freed ones, until the collector looks for cycles."""

STARTED_S = 10.0
"""By then a process has made its routes and what else stays, another tenth of a second to look at.
"""

ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104


def run_until_signal(
    run: Callable[[asyncio.Event], Awaitable[None]], reload: Callable[[], None] | None = None
) -> None:
    """Run a process that stops when its event is set, which SIGTERM and SIGINT do. SIGHUP calls
    `reload`; it stops a process that has none, unless it was started to outlive its terminal.
    """

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if reload is not None or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload or stop.set)
        asyncio.get_running_loop().call_later(STARTED_S, gc.freeze)
        await run(stop)

    _keep_for_good()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _keep_for_good() -> None:
    """What is there before a process serves, mostly modules, stays: a look at all of it takes the
    collector a tenth of a second, and it would look again and again. What requests make has no
    cycles, as a rule, and need not be looked at often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def unbindable(error: OSError) -> str:
    """Why an address cannot be listened on, in the system's words alone."""
    in_use = "another process listens there"
    return in_use if error.errno == errno.EADDRINUSE else str(error.strerror or error)


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound before anything depends on it. Raises ConfigError."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {unbindable(error)}"
        allowed = "a free port, as --http-port N; 0 takes any"
        raise ConfigError("http_port", problem, allowed) from error
    with listener:
        yield listener


def endpoint_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    """URL of a listening socket; the machine's name where it listens on every address."""
    host, port = listener.getsockname()[:2]
    name = socket.gethostname() if host in ANY_ADDRESS else host
    return f"http{'s' * has_tls}://{f'[{name}]' if ':' in name else name}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn within limits, leaving signals alone. `serve` it on a socket, then set `should_exit`.

    `refused` is told the codes of refusals that the application does not see; `protocol` answers
    one connection.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpLimits,
        tls: ssl.SSLContext | None = None,
        refused: Callable[[str], None] = lambda _: None,
        protocol: type[LimitedProtocol] = LimitedProtocol,
    ) -> None:
        self._limits = limits
        super().__init__(
            HttpConfig(
                app,
                http=protocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                proxy_headers=False,
                timeout_keep_alive=limits.keep_alive_s,
                timeout_graceful_shutdown=SHUTDOWN_S,
                ssl_context_factory=None if tls is None else lambda _config, _default: tls,
                limits=limits,
                refused=refused,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on sockets; as uvicorn does, which has no limits for how long TLS may take."""
        tls, limits = self.config.ssl, self._limits
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._protocol,
                sock=listener,
                ssl=tls,
                backlog=self.config.backlog,
                ssl_handshake_timeout=None if tls is None else limits.header_timeout_s,
                ssl_shutdown_timeout=None if tls is None else limits.header_timeout_s,
            )
            for listener in sockets or ()
        ]
        self.started = True

    def _protocol(self) -> asyncio.Protocol:
        connected: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        state = self.server_state
        return connected(config=self.config, server_state=state, app_state=self.lifespan.state)

    async def main_loop(self) -> None:
        """Tick until it should end; as uvicorn does, at moments that others tick at, too."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            await next_moment(TICK_S)

    async def on_tick(self, counter: int) -> bool:
        """What uvicorn does ten times a second; and close whose patience has ended."""
        now_s = asyncio.get_running_loop().time()
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, LimitedProtocol):
                connection.check_patience(now_s)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def serve_until(
    stop: asyncio.Event,
    server: HttpServer,
    listener: socket.socket,
    background: Iterable[Coroutine[Any, Any, None]],
    drain: Callable[[], Awaitable[None]],
) -> None:
    """Serve, with tasks beside, until `stop` is set; then drain, close, and cancel the tasks."""
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve([listener]))
        tasks = [group.create_task(each) for each in background]
        await stop.wait()
        await drain()
        server.should_exit = True
        await serving
        for task in tasks:
            task.cancel()
