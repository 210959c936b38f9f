"""Real servers on free ports, and patience."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

BIN = Path(sys.executable).parent


PORTS_A_PROCESS = 2_000


def free_port() -> int:
    """A port that nobody listens on, nor is about to: every process of tests has a range of its
    own, below those that the system gives to connections.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 10_000 + process % 10 * PORTS_A_PROCESS
    while True:
        port = first + random.randrange(PORTS_A_PROCESS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_for_port(port: int, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
        else:
            return


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
        """Answer nobody any more, until it is killed; every thread has stopped on return."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


async def eventually(condition, timeout_s: float = 10.0, poll_s: float = 0.02):
    """What an (async or plain) condition returns, once it is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return result
            await asyncio.sleep(poll_s)


async def equals(answer, expected):
    """Whether an awaited answer is the expected one; for `eventually`."""
    return await answer == expected


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
