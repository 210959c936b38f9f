"""Real servers on free ports, and patience."""

import asyncio
import fcntl
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

BIN = Path(sys.executable).parent

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of `http://` alone: to read the system's authorities takes each of them 20 ms."""

FIRST_PORT = 10_000
RANGES, PORTS_A_RANGE = 11, 2_000
RANKS_A_PORT = 8  # an engine's ranks listen on the ports that follow its own


def _ports() -> Iterator[int]:
    """In turn: one given away and not yet bound is not given away again."""
    first, turn = FIRST_PORT + _own_range() * PORTS_A_RANGE, random.randrange(PORTS_A_RANGE)
    while True:
        yield first + turn % PORTS_A_RANGE
        turn += RANKS_A_PORT


def _own_range() -> int:
    """One that no other process of tests on this machine has; any, if all are taken."""
    for number in range(RANGES):
        with suppress(OSError):
            path = Path(tempfile.gettempdir()) / f"kv-router-test-ports-{number}"
            lock = os.open(path, os.O_RDWR | os.O_CREAT)
            if _is_locked(lock):
                return number
            os.close(lock)
    return random.randrange(RANGES)


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_PORTS = _ports()


REFUSED_BY_BROWSERS = frozenset({10080})
"""Chromium does not open pages on these ports."""


def free_port() -> int:
    """Return a port that no process listens on, nor is about to.

    Every process of tests has a range of its own, below those that the system gives to connections.
    """
    for port in _PORTS:
        if port in REFUSED_BY_BROWSERS:
            continue
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("ports never end")


def wait_for_port(port: int, timeout_s: float = 120.0) -> None:
    """Wait until a port of this machine accepts connections. Raises TimeoutError."""

    def accepts():
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
            return True

    until(accepts, timeout_s)


def freeze(pid: int) -> None:
    """Stop a process, with all its threads before this returns: a signal alone is no promise."""
    os.kill(pid, signal.SIGSTOP)

    def is_frozen():
        stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    until(is_frozen)


def until(condition, timeout_s: float = 120.0, poll_s: float = 0.01):
    """Wait until a condition is true, where no event loop runs. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(poll_s)


class NatsServer:
    """A nats-server that can be killed and started again, with or without its store."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._directory = directory
        self._stores = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, *, empty: bool = False) -> None:
        self._stores += empty
        store = self._directory / f"store-{self._stores}"
        command = [str(BIN / "nats-server"), "-js", "-sd", str(store)]
        self._process = subprocess.Popen(
            [*command, "-a", "127.0.0.1", "-p", str(self.port)], stderr=subprocess.DEVNULL
        )
        wait_for_port(self.port)

    def pause(self) -> None:
        """Stop answering, until it is killed; every thread has stopped on return."""
        assert self._process is not None
        freeze(self._process.pid)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


async def eventually(condition, timeout_s: float = 120.0, poll_s: float = 0.02):
    """What an (async or plain) condition returns, once it is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return result
            await asyncio.sleep(poll_s)


async def until_still(measure, pause_s: float = 0.3):
    """Wait until a value has not changed for `pause_s`. Returns it."""
    seen = [None, measure()]

    def is_still():
        seen.append(measure())
        return seen[-1] == seen[-2]

    await eventually(is_still, poll_s=pause_s)
    return seen[-1]


async def equals(answer, expected):
    """Whether an awaited answer is the expected one; for `eventually`."""
    return await answer == expected


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
