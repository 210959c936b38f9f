"""The sections of `startup.py`, and the processes that they start."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
from conformance.environments import python_of
from direct_router import processor_s_of
from events_processes import free_port, running_server
from installed_size import installed_bytes
from msgspec import Struct
from peer import PYTHON, REQUIREMENTS, VENV
from rows import Row
from timing import Bounded, alternate

START_S = 900.0  # a first start compiles kernels: up to five minutes on a loaded machine
REST_S = 3.0
GOAL_S, ASKING_GOAL_S, FIRST_GOAL_S = 1.0, 0.5, 30.0
GOAL_MB, SIZE_GOAL_MB = 130.0, 360.0
SIZE_SCRIPT = Path(__file__).with_name("installed_size.py")
Times = tuple[float, float]
"""Seconds until it answered, and of processors, of all its threads."""

PEER = [str(PYTHON), "-m", "dynamo.select_service", "--threads", "2"]


class StartupScale(Struct, frozen=True):
    """How often everything is started."""

    is_quick: bool

    @property
    def rounds(self) -> int:
        return 3 if self.is_quick else 9

    def __str__(self) -> str:
        return f"medians of {self.rounds} interleaved rounds, the first start once"


class Started(Struct, frozen=True):
    """A server that has answered."""

    pid: int
    url: str
    seconds: float
    processor_s: float

    @property
    def resident_mb(self) -> float:
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def started(
    command: Sequence[str], port_flag: str = "--http-port", **variables: str
) -> Iterator[Started]:
    """Started on a free port, in an empty folder; there once `/health` has answered 200."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    is_peer = command[0] == str(PYTHON)
    environment = {k: v for k, v in os.environ.items() if not (is_peer and k == "PYTHONPATH")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installations have bytecode
    with TemporaryDirectory() as folder:
        begun_s = time.monotonic()
        process = subprocess.Popen(
            [*command, port_flag, str(port)], env=environment | {"DYN_LOG": "error"} | variables,
            cwd=folder if is_peer else None, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            _wait_until_healthy(process, f"{url}/health", begun_s + START_S)
            seconds = time.monotonic() - begun_s
            yield Started(process.pid, url, seconds, processor_s_of(process.pid))
        finally:
            process.terminate()
            process.wait(START_S)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, deadline_s: float) -> None:
    with httpx.Client() as client:
        while time.monotonic() < deadline_s and process.poll() is None:
            try:
                if client.get(url).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.005)
    raise RuntimeError(f"no response at {url}; exit status: {process.poll()}")


def _ours(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "router", name, *options]


def time_rows(scale: StartupScale) -> list[Row]:
    """`serve` beside the peer's service; the index, the forwarder and the probe by themselves."""
    python_of(VENV, REQUIREMENTS)
    with started(_ours("serve")) as router:
        forward = _ours("forward", "--router-url", router.url)
        sides: list[Callable[[int], Times]] = [
            lambda _: _start(_ours("serve")),
            lambda _: _start(PEER, "--port"),
            lambda _: _start(_ours("indexer")),
            lambda _: _start(forward),
            lambda _: (_asked(router.url), 0.0),
        ]
        rounds = alternate(sides, scale.rounds, warm_up=True)
    serve, peer, indexer, forwarder, probe = (median(wall for wall, _ in each) for each in rounds)
    processor, peer_processor = (median(used for _, used in each) for each in rounds[:2])
    return [
        Bounded("serve", serve, peer, "s", GOAL_S, lower=True),
        Bounded("serve, processor time", processor, peer_processor, "s", GOAL_S, lower=True),
        Bounded("indexer", indexer, GOAL_S, "s", GOAL_S, lower=True),
        Bounded("forward", forwarder, GOAL_S, "s", GOAL_S, lower=True),
        Bounded("kv-router health", probe, ASKING_GOAL_S, "s", ASKING_GOAL_S, lower=True),
    ]


def first_rows(_: StartupScale) -> list[Row]:
    """Once, with no folder of kernels; processor time includes the compiler's process."""
    with (
        TemporaryDirectory() as home,
        started(_ours("serve"), XDG_CACHE_HOME=home, TMPDIR=home, NUMBA_CACHE_DIR="") as router,
    ):
        wall_s, used_s = router.seconds, router.processor_s + _processor_s_of_children(router.pid)
    return [
        Bounded("serve", wall_s, FIRST_GOAL_S, "s", FIRST_GOAL_S, lower=True),
        Bounded("serve, processor time", used_s, FIRST_GOAL_S, "s", FIRST_GOAL_S, lower=True),
    ]


def _processor_s_of_children(pid: int) -> float:
    """Return the processor time of a process's children that have ended, in hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def _start(command: Sequence[str], port_flag: str = "--http-port") -> Times:
    with started(command, port_flag) as server:
        return server.seconds, server.processor_s


def _asked(url: str) -> float:
    """Seconds of a container's health check."""
    begun_s = time.monotonic()
    port = url.rpartition(":")[2]
    subprocess.run(_ours("health", "serve", "--http-port", port), check=True)
    return time.monotonic() - begun_s


def memory_rows(_: StartupScale) -> list[Row]:
    """Of all of them at once, each idle."""
    python_of(VENV, REQUIREMENTS)
    with ExitStack() as stack:
        bus = stack.enter_context(running_server())
        direct = stack.enter_context(started(_ours("serve")))
        peer = stack.enter_context(started(PEER, "--port"))
        others = {
            "serve, on NATS": _ours("serve", "--nats-url", bus.url),
            "indexer": _ours("indexer"),
            "forward": _ours("forward", "--router-url", direct.url),
        }
        resting = {name: stack.enter_context(started(each)) for name, each in others.items()}
        time.sleep(REST_S)
        return [
            Bounded("serve", direct.resident_mb, peer.resident_mb, "MB", GOAL_MB, lower=True),
            *[
                Bounded(name, each.resident_mb, GOAL_MB, "MB", GOAL_MB, lower=True)
                for name, each in resting.items()
            ],
        ]


def size_rows(_: StartupScale) -> list[Row]:
    """As installed here; the peer, as installed in its environment."""
    python_of(VENV, REQUIREMENTS)
    ours_mb = installed_bytes("kv-router") / 1e6
    answer = subprocess.check_output([PYTHON, SIZE_SCRIPT, "ai-dynamo-runtime"])
    return [Bounded("installed", ours_mb, int(answer) / 1e6, "MB", SIZE_GOAL_MB, lower=True)]


MEASURE: Mapping[str, Callable[[StartupScale], list[Row]]] = {
    "first": first_rows,
    "time": time_rows,
    "memory": memory_rows,
    "size": size_rows,
}
