"""What the kit needs of a system, and a server process to build one from."""

import asyncio
import random
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import httpx
from msgspec import Struct

from ..steps import Prompt

START_S = 120.0
POLL_S = 0.1
ANSWER_S = 30.0
PORTS = 15_000, 32_000


class StartError(Exception):
    """The system cannot be had on this machine; says why."""


class Seat(Struct, frozen=True):
    """An engine as a system is told of it. Seats of one model are asked together."""

    worker_id: int
    model_name: str
    events_endpoint: str
    replay_endpoint: str | None
    reannounces: bool


class Answer(Struct, frozen=True):
    """What a system believes.

    `blocks`: leading cached blocks by worker id; a worker left out was not answered for. `doubts`:
    in its own words, for the workers whose count it does not vouch for.
    """

    blocks: Mapping[int, int]
    doubts: Mapping[int, str] = {}


class System(Protocol):
    """A router under test, with a folder of its own.

    It is told all engines at its start. `answers_best_only`: it shows what it credits to the worker
    it chose, and nothing of the others.
    """

    title: str
    answers_best_only: bool

    def __init__(self, directory: Path) -> None: ...

    async def start(self, seats: Sequence[Seat]) -> None:
        """Until it is ready to be asked; raises StartError."""

    async def ask(self, seats: Sequence[Seat], prompt: Prompt) -> Answer:
        """What do these engines, which are all of one model, hold of a prompt?"""

    async def restart(self) -> None:
        """SIGKILL, and started again, told again what an operator would have to tell it."""

    async def stop(self) -> None:
        """No process is left behind."""


class Server:
    """A process with an HTTP port and its output in a file."""

    def __init__(self, directory: Path, name: str) -> None:
        self.log = directory / f"{name}.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, command: Sequence[str], path: str) -> None:
        """Until it answers 200 there."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not await self._is_ready(path):
            if self._process.returncode is not None or time.monotonic() > deadline:
                raise StartError(f"does not start: {self._last_words()}")
            await asyncio.sleep(POLL_S)

    def _last_words(self) -> str:
        words = self.log.read_text(errors="replace").strip() or "it says nothing"
        return words.splitlines()[-1]

    async def _is_ready(self, path: str) -> bool:
        try:
            return (await self.client.get(path)).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def close(self) -> None:
        await self.kill()
        await self.client.aclose()


def free_port() -> int:
    """A port nobody listens on, below those that systems give to whoever asks for any.

    One of those could be given away before the server binds it, or while it is restarted.
    """
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
