"""The processes of `forward.py`: a trivial engine, ours in front of it, and the peers."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from conformance.environments import BENCHMARKS, python_of, shipped_python
from direct_router import processor_s_of
from events_processes import free_port, pin
from msgspec import Struct

SERVER_CORE, OTHER_CORE = 0, 1
START_S = 300.0  # kernels may have to be compiled first
ENGINE = Path(__file__).with_name("forward_engine.py")
MODEL, PATH = "m", "/v1/completions"


class Scale(Struct, frozen=True):
    """How much is measured."""

    is_quick: bool

    @property
    def requests(self) -> int:
        return 250 if self.is_quick else 500

    @property
    def requests_together(self) -> int:
        """Of a round with many at once: enough that connecting does not count."""
        return 2_000

    @property
    def rounds(self) -> int:
        return 5 if self.is_quick else 21

    @property
    def idle_streams(self) -> int:
        return 2_000

    def __str__(self) -> str:
        return f"medians of {self.rounds} interleaved rounds of {self.requests} requests"


class Served(Struct, frozen=True):
    """A server on a port of this machine. `pids`: of all processes that a request passes."""

    port: int
    pids: tuple[int, ...]

    @property
    def processor_s(self) -> float:
        """Processor time of its processes so far."""
        return sum(map(processor_s_of, self.pids))

    @property
    def resident_mb(self) -> float:
        """Memory that the first of its processes has."""
        pages = int(Path(f"/proc/{self.pids[0]}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _started(
    stack: ExitStack, command: Sequence[str], core: int, port: int, path: str = "/health"
) -> int:
    """Start a process on a core, wait until it answers there, and return its id."""
    environment = {**os.environ, "RUST_LOG": "error"}
    environment.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        command, env=environment, preexec_fn=lambda: pin(core),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.terminate)
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5).status_code < 300:
                return process.pid
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError(" ".join(command))


@contextmanager
def engine(chunks: int = 0, interval_s: float = 0.0, tokenizer: str = "") -> Iterator[Served]:
    """Run a trivial engine; `tokenizer`: a file, of which it returns tokens."""
    port = free_port()
    with ExitStack() as stack:
        command = [sys.executable, str(ENGINE), str(port), str(chunks), str(interval_s), tokenizer]
        yield Served(port, (_started(stack, command, OTHER_CORE, port),))


@contextmanager
def ours(engine_port: int, *settings: str) -> Iterator[Served]:
    """Run a router with an OpenAI endpoint before an engine, with further settings as flags."""
    router_port, port = free_port(), free_port()
    command = [
        str(shipped_python()), "-m", "router", "serve", "--no-use-kv-events",
        "--workers", f"http://127.0.0.1:{engine_port}", "--http-port", str(router_port),
        "--openai-port", str(port), "--log-level", "error", *settings,
    ]  # fmt: skip
    with ExitStack() as stack:
        pid = _started(stack, command, SERVER_CORE, port, "/ready")
        until_served(port, {"prompt": [1, 2, 3]})
        yield Served(port, (pid,))


@contextmanager
def ours_separate(engine_port: int) -> Iterator[Served]:
    """Run a router, and an endpoint in a process of its own."""
    router_port, port = free_port(), free_port()
    command = [str(shipped_python()), "-m", "router"]
    serve = ["serve", "--no-use-kv-events", "--workers", f"http://127.0.0.1:{engine_port}"]
    at = ["--http-port", str(router_port), "--log-level", "error"]
    forward = ["forward", "--router-url", f"http://127.0.0.1:{router_port}"]
    own = ["--http-port", str(port), "--log-level", "error"]
    with ExitStack() as stack:
        router = _started(stack, [*command, *serve, *at], SERVER_CORE, router_port)
        pid = _started(stack, [*command, *forward, *own], SERVER_CORE, port, "/ready")
        until_served(port, {"prompt": [1, 2, 3]})
        yield Served(port, (pid, router))


@contextmanager
def peer(name: str, engine_port: int, prompt: object) -> Iterator[Served]:
    """Run a peer, which takes turns among one engine."""
    requirements = BENCHMARKS / f"{name}-requirements.txt"
    python = str(python_of(BENCHMARKS / f".{name}-venv", requirements))
    port = free_port()
    program = (
        ["-m", "vllm_router.launch_router"] if name == "vllm-router" else ["-m", "smg", "launch"]
    )
    command = [
        python, *program, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
        "--prometheus-port", str(free_port()),
        "--worker-urls", f"http://127.0.0.1:{engine_port}",
    ]  # fmt: skip
    with ExitStack() as stack:
        pid = _started(stack, command, SERVER_CORE, port)
        until_served(port, {"prompt": prompt})
        yield Served(port, (pid,))


def until_served(port: int, fields: Mapping[str, object]) -> None:
    """Wait until a completion is answered: proxies look for their engines once they have started.

    Raises TimeoutError.
    """
    deadline_s, last = time.monotonic() + 60.0, ""
    while time.monotonic() < deadline_s:
        url = f"http://127.0.0.1:{port}{PATH}"
        answer = httpx.post(url, json={"model": MODEL, **fields}, timeout=60.0)
        if answer.status_code == 200:
            return
        last = f"{answer.status_code}: {answer.text[:200]}"
        time.sleep(0.2)
    raise TimeoutError(f"port {port} responds {last}")
