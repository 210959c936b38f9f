"""The interface of a system under test, and a server process to build one from."""

import asyncio
import random
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import httpx
from msgspec import Struct

from router.tools.conformance.steps import Marks, Prompt

START_S = 120.0
POLL_S = 0.1
ANSWER_S = 30.0
PORTS = 15_000, 32_000
SEVERE = re.compile(r'\b(WARN|WARNING|ERROR)\b|"level": ?"(warning|error|critical)"')
"""Finds a warning or an error, in a line of text or of JSON."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class StartError(Exception):
    """A system that cannot run on this machine; the message is the reason."""


class Seat(Struct, frozen=True):
    """An engine as a system is configured with it. Seats of one model are asked about together.

    `kind`: vllm or sglang. `reannounces`: the engine may report again what it already holds.
    `restarts`: the engine will die and return; a process beside it has to die alone.
    `chunk_tokens`: see `EngineSpec`.
    """

    worker_id: int
    model_name: str
    events_endpoint: str
    replay_endpoint: str | None
    kind: str
    reannounces: bool
    restarts: bool
    chunk_tokens: int | None = None


class Answer(Struct, frozen=True):
    """The blocks that a system counts as cached.

    `blocks`: leading cached blocks by worker id; a worker that is missing has no answer.
    `doubts`: for the workers with a count that the system itself calls uncertain, in its words.
    """

    blocks: Mapping[int, int]
    doubts: Mapping[int, str] = {}


class Remark(Struct, frozen=True):
    """A warning or an error in a system's log. `worker_id`: None if it names no engine."""

    text: str
    worker_id: int | None = None


class System(Protocol):
    """A router under test, with a folder of its own.

    It receives all engines at its start. `answers_best_only`: it reports the count of the worker
    that it chose, and of no other. `marks`: the form of salts and images of its front end. `skips`:
    root causes and scenarios that its design rules out; they are not scored for it.
    """

    title: str
    answers_best_only: bool
    marks: Marks
    skips: frozenset[str]

    def __init__(self, directory: Path) -> None: ...

    async def start(self, seats: Sequence[Seat]) -> None:
        """Start, and wait until questions are answered. Raises StartError."""

    async def ask(self, seats: Sequence[Seat], prompt: Prompt) -> Answer:
        """Return the blocks of a prompt that these engines, all of one model, hold."""

    def remarks(self) -> Sequence[Remark]:
        """Return the warnings of its log since the last call."""

    async def engine_restarted(self, seat: Seat) -> None:
        """Do what a fleet does when an engine dies and returns; most systems need nothing."""

    async def restart(self) -> None:
        """Kill it with SIGKILL, and start it again with the configuration that an operator has."""

    async def stop(self) -> None:
        """Leave no process behind."""


class Log:
    """The log file of a process, read from where the last reading ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_bytes = 0

    def skip(self) -> None:
        """Pass over what was written so far."""
        self._read_bytes = self.path.stat().st_size

    def warnings(self) -> list[str]:
        """Return the new lines with a warning or an error, without colours."""
        with self.path.open("rb") as log:
            log.seek(self._read_bytes)
            new = log.read()
        new = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(new)
        lines = COLOURS.sub("", new.decode(errors="replace")).splitlines()
        return [line for line in lines if SEVERE.search(line)]


class Server:
    """A process with an HTTP port, and its output in a file."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{name}.log"
        self.path.touch()
        self.log = Log(self.path)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, command: Sequence[str], path: str) -> None:
        """Start, and wait until a GET of `path` returns 200. Raises StartError."""
        with self.path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not await self._is_ready(path):
            if self._process.returncode is not None or time.monotonic() > deadline:
                raise StartError(f"does not start: {self._last_line()}")
            await asyncio.sleep(POLL_S)

    def _last_line(self) -> str:
        words = self.path.read_text(errors="replace").strip() or "its log is empty"
        return words.splitlines()[-1]

    async def _is_ready(self, path: str) -> bool:
        try:
            return (await self.client.get(path)).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def kill(self) -> None:
        """Kill it at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def close(self) -> None:
        """Kill it, and close the client."""
        await self.kill()
        await self.client.aclose()


def free_port() -> int:
    """Return a free port, below those that the kernel gives to sockets without one.

    One of those could be taken before the server binds it, or while the server is restarted.
    """
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
