"""Running a process: its signals, its HTTP server inside its one TaskGroup."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from router.errors import ConfigError

SHUTDOWN_S = 5
ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104


def run_until_signal(run: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run a process that stops when its event is set, which SIGTERM and SIGINT do."""

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run(stop)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound before anything depends on it. Raises ConfigError."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {error}"
        raise ConfigError("http_port", problem, "a free port of this machine") from error
    with listener:
        yield listener


def endpoint_of(listener: socket.socket) -> str:
    """URL of a listening socket; the machine's name where it listens on every address."""
    host, port = listener.getsockname()[:2]
    return f"http://{socket.gethostname() if host in ANY_ADDRESS else host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn, leaving signals alone. `serve` it on a socket, then set `should_exit`."""

    def __init__(self, app: ASGIApp, max_connections: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=max_connections,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )

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
