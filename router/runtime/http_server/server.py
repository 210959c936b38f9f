"""Running a process: its signals, and its HTTP server in its one TaskGroup."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from router.errors import ConfigError
from router.runtime.http_server.direct_protocol import DirectProtocol, HotService
from router.runtime.http_server.limited_connection import HttpConfig, LimitedProtocol
from router.runtime.http_server.limits import HttpLimits
from router.runtime.process.settings import flags_of
from router.runtime.process.ticks import next_tick

SHUTDOWN_S = 5

CLOSING_S = 5.0
"""Longest time between the end of all tasks and that of the process.

A loop is closed once its threads are idle. Calls on threads cannot be cancelled: a lookup of a name
takes as long as the system's resolver waits.
"""

TICK_S = 0.1
"""Interval at which a server checks timeouts, in seconds; the same as uvicorn's."""

ACCEPTED_AT_ONCE = 16
"""Connections that an iteration of the event loop accepts."""

YOUNG_OBJECTS = 20_000
"""Surplus of new objects over freed ones that starts a garbage collection."""

STARTED_S = 10.0
"""Seconds after which start-up objects, such as routes, are excluded from garbage collection.

Scanning them would take another tenth of a second.
"""

ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104


log = logging.getLogger(__name__)


def run_until_signal(
    run: Callable[[asyncio.Event], Awaitable[None]], reload: Callable[[], None] | None = None
) -> None:
    """Run a process until SIGTERM or SIGINT, which set its stop event.

    The process ends within `CLOSING_S` after that, whatever its threads do. SIGHUP calls `reload`.
    Without `reload` it stops the process, unless the process ignores SIGHUP (nohup).
    """

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if reload is not None or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload or stop.set)
        asyncio.get_running_loop().call_later(STARTED_S, gc.freeze)
        await run(stop)

    status = 1

    def end() -> None:
        log.warning("ended without waiting for calls on threads, such as lookups of names")
        logging.shutdown()
        os._exit(status)

    _keep_for_good()
    closing = threading.Timer(CLOSING_S, end)
    closing.daemon = True
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(main())
                status = 0
            finally:
                closing.start()
    finally:
        closing.cancel()


def _keep_for_good() -> None:
    """Exclude the objects that exist before serving, mostly modules, from garbage collection.

    A scan of all of them would take a tenth of a second, repeatedly, and a first one two tenths.
    Requests rarely create cycles, so young objects need few collections.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def unbindable(error: OSError) -> str:
    """Return the reason why an address cannot be bound."""
    in_use = "another process listens there"
    return in_use if error.errno == errno.EADDRINUSE else str(error.strerror or error)


@contextlib.contextmanager
def listening(host: str, port: int, key: str = "http_port") -> Iterator[socket.socket]:
    """Bind a socket before anything depends on it. Raises ConfigError, which names the setting."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {unbindable(error)}"
        any_port = "; 0 takes any" if key == "http_port" else ""
        allowed = f"a free port, as {flags_of(key)[0]} N{any_port}"
        raise ConfigError(key, problem, allowed) from error
    # Connections inherit it; asyncio sets it only for sockets that name their protocol. Without it
    # each body that is sent behind its head waits for a delayed acknowledgement, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener:
        yield listener


def endpoint_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    """Return the URL of a listening socket, with the machine's name if it listens everywhere."""
    host, port = listener.getsockname()[:2]
    name = socket.gethostname() if host in ANY_ADDRESS else host
    return f"http{'s' * has_tls}://{f'[{name}]' if ':' in name else name}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn with limits and without signal handlers. `serve` it, then set `should_exit`.

    `refused`: called with the code of each request refused below the application. `hot`: the
    service of requests that are answered below the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpLimits,
        tls: ssl.SSLContext | None = None,
        refused: Callable[[str], None] = lambda _: None,
        hot: HotService | None = None,
    ) -> None:
        self._limits = limits
        self._hot = hot
        super().__init__(
            HttpConfig(
                app,
                http=LimitedProtocol if hot is None else DirectProtocol,
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
                hot=hot,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on sockets as uvicorn does, with timeouts of TLS handshakes in addition."""
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
        """Tick until the server should exit, as uvicorn does, at times shared with other timers."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            await next_tick(TICK_S)

    async def on_tick(self, counter: int) -> bool:
        """Close connections that exceed a timeout, run uvicorn's periodic work, renew the date."""
        now_s = asyncio.get_running_loop().time()
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, LimitedProtocol):
                connection.check_patience(now_s)
        is_over = await super().on_tick(counter)
        hot, headers = self._hot, self.server_state.default_headers
        if hot is not None and hot.lines.headers is not headers:
            hot.lines.renew(headers)
        return is_over

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers unchanged."""
        yield


async def run_until(
    stop: asyncio.Event,
    background: Iterable[Coroutine[Any, Any, None]],
    drain: Callable[[], Awaitable[None]],
) -> None:
    """Run tasks until `stop` is set; then drain, and cancel them."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in background]
        await stop.wait()
        await drain()
        for task in tasks:
            task.cancel()


async def serve_until(
    stop: asyncio.Event,
    server: HttpServer,
    listener: socket.socket,
    background: Iterable[Coroutine[Any, Any, None]],
    drain: Callable[[], Awaitable[None]],
) -> None:
    """Serve, with background tasks, until `stop` is set; then drain, close and cancel them."""
    with duplicated(listener) as listeners:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(listeners))
            tasks = [group.create_task(each) for each in background]
            await stop.wait()
            await drain()
            server.should_exit = True
            await serving
            for task in tasks:
                task.cancel()


@contextlib.contextmanager
def duplicated(listener: socket.socket) -> Iterator[list[socket.socket]]:
    """Duplicate a listening socket, so that each iteration of the loop accepts more connections.

    libuv accepts one connection of a socket in an iteration: a thousand callers would wait for a
    thousand iterations.
    """
    with contextlib.ExitStack() as stack:
        duplicates = [stack.enter_context(listener.dup()) for _ in range(ACCEPTED_AT_ONCE - 1)]
        yield [listener, *duplicates]
