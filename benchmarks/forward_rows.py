"""The sections of `forward.py`, and the processes that they measure."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import httpx
from conformance.environments import BENCHMARKS, python_of
from direct_router import processor_s_of
from events_processes import free_port, pin
from msgspec import Struct
from rows import Row
from timing import Bounded

from router.runtime.http_client import HttpPool, Origin, PoolLimits, Request

SERVER_CORE, OTHER_CORE = 0, 1
START_S = 300.0  # kernels may have to be compiled first
ENGINE = Path(__file__).with_name("forward_engine.py")
TOKENS = 1000
SENT = re.compile(rb'"text":"(\d+)"')
JSON = ((b"content-type", b"application/json"),)
PEERS = {"vllm-router": "ids", "smg": "text"}
"""And what prompts it takes in `/v1/completions`."""


class Scale(Struct, frozen=True):
    """How much is measured."""

    is_quick: bool

    @property
    def requests(self) -> int:
        return 300 if self.is_quick else 2_000

    @property
    def rounds(self) -> int:
        return 3 if self.is_quick else 7

    @property
    def idle_streams(self) -> int:
        return 2_000


def _started(stack: ExitStack, command: Sequence[str], core: int, port: int) -> int:
    """A process of a core, once it answers there; its process id."""
    environment = {**os.environ, "RUST_LOG": "error"}
    process = subprocess.Popen(
        command, env=environment, preexec_fn=lambda: pin(core),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.terminate)
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code < 500:
                return process.pid
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError(" ".join(command))


@contextmanager
def engine(chunks: int = 0, interval_s: float = 0.0) -> Iterator[int]:
    """A trivial engine's port."""
    port = free_port()
    with ExitStack() as stack:
        command = [sys.executable, str(ENGINE), str(port), str(chunks), str(interval_s)]
        _started(stack, command, OTHER_CORE, port)
        yield port


@contextmanager
def ours(engine_port: int) -> Iterator[tuple[int, int]]:
    """A router and a process that forwards before one engine: port and id of the latter."""
    router_port, port = free_port(), free_port()
    with ExitStack() as stack:
        command = [sys.executable, "-m", "router"]
        quiet = ["--log-level", "error"]
        serve = ["serve", "--no-use-kv-events", "--http-port", str(router_port), *quiet]
        _started(stack, [*command, *serve], SERVER_CORE, router_port)
        worker = {"worker_id": 1, "endpoint": f"http://127.0.0.1:{engine_port}", "block_size": 16}
        registered = {**worker, "model_name": "default", "total_kv_blocks": 100_000}
        answer = httpx.post(f"http://127.0.0.1:{router_port}/workers", json=registered)
        answer.raise_for_status()
        forward = ["forward", "--router-url", f"http://127.0.0.1:{router_port}", *quiet]
        pid = _started(stack, [*command, *forward, "--http-port", str(port)], SERVER_CORE, port)
        yield port, pid


@contextmanager
def peer(name: str, engine_port: int) -> Iterator[int]:
    """A peer's port."""
    requirements = BENCHMARKS / f"{name}-requirements.txt"
    python = str(python_of(BENCHMARKS / f".{name}-venv", requirements))
    port = free_port()
    program = (
        ["-m", "vllm_router.launch_router"] if name == "vllm-router" else ["-m", "smg", "launch"]
    )
    with ExitStack() as stack:
        command = [
            python, *program, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
            "--prometheus-port", str(free_port()),
            "--worker-urls", f"http://127.0.0.1:{engine_port}",
        ]  # fmt: skip
        _started(stack, command, SERVER_CORE, port)
        _until_served(port, PEERS[name])
        yield port


def _until_served(port: int, kind: str) -> None:
    """Peers look for their engines once they have started."""
    deadline_s, status = time.monotonic() + 60.0, 0
    while time.monotonic() < deadline_s:
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(
            url, content=_body(kind, 0), headers={"content-type": "application/json"}
        )
        status = answer.status_code
        if status == 200:
            return
        time.sleep(0.2)
    raise TimeoutError(f"port {port} answers {status}: {answer.text[:200]}")


def latency(scale: Scale) -> list[Row]:
    """Added to what the engine takes when it is asked itself, medians of one at a time."""
    rows = []
    with engine() as direct, ours(direct) as (port, _), ExitStack() as stack:
        for name, kind in PEERS.items():
            other = stack.enter_context(peer(name, direct))
            added = asyncio.run(_added_us(scale, (direct, port, other), kind))
            title = f"{name}, {'token ids' if kind == 'ids' else 'new text'}"
            rows.append(Row(title, *added, "µs", 1.2, lower=True))
    return rows


async def _added_us(scale: Scale, ports: Sequence[int], kind: str) -> tuple[float, float]:
    """Ours and the peer's, in turn; each round is compared with the engine of that round."""
    added: list[tuple[float, float]] = []
    pool = HttpPool(PoolLimits())
    for number in range(scale.rounds + 1):
        engine_us, ours_us, peer_us = [
            await _round_us(pool, port, scale.requests, kind, number) for port in ports
        ]
        if number:  # the first warms up
            added.append((ours_us - engine_us, peer_us - engine_us))
    pool.close()
    return median(own for own, _ in added), median(other for _, other in added)


async def _round_us(pool: HttpPool, port: int, requests: int, kind: str, seed: int) -> float:
    origin, times = Origin.of(f"http://127.0.0.1:{port}"), []
    for number in range(requests):
        body = _body(kind, seed * requests + number)
        began_s = time.perf_counter()
        request = Request("POST", "/v1/completions", body, JSON)
        async with pool.asked(origin, request, 60.0) as answer:
            await answer.read(1 << 20, 60.0)
            assert answer.status == 200, answer.status
        times.append(time.perf_counter() - began_s)
    return 1e6 * median(times)


def _body(kind: str, number: int) -> bytes:
    first = 1000 + number % 100_000
    ids = [first, *(each * 37 % 50_000 for each in range(TOKENS - 1))]
    prompt = ids if kind == "ids" else f"{first} " + "word " * (TOKENS - 1)
    return json.dumps({"model": "default", "prompt": prompt, "max_tokens": 1}).encode()


def stream(scale: Scale) -> list[Row]:
    """64 streams of a chunk every 20 ms each: from the engine's hand to the client's, beyond what
    it takes without us; and our processor's time for a chunk.
    """
    chunks = 50 if scale.is_quick else 500
    with engine(chunks, 0.02) as direct, ours(direct) as (port, pid):
        asyncio.run(_stream_ms(port, 64))  # warm
        without = asyncio.run(_stream_ms(direct, 64))
        before_s = processor_s_of(pid)
        with_us = asyncio.run(_stream_ms(port, 64))
        cpu_ms = 1e3 * (processor_s_of(pid) - before_s) / (64 * chunks)
    added_ms = median(with_us) - median(without)
    return [
        Bounded("added to a chunk, p50", added_ms, 1.0, "ms", 1.0, lower=True),
        Bounded("processor time of a chunk", cpu_ms, 1.0, "ms", 1.0, lower=True),
    ]


async def _stream_ms(port: int, streams: int) -> list[float]:
    pool, delays = HttpPool(PoolLimits(max_connections=streams)), []

    async def one(number: int) -> None:
        await asyncio.sleep(0.02 * number / streams)
        body = json.dumps({"model": "default", "prompt": [number, 2, 3], "stream": True}).encode()
        request = Request("POST", "/v1/completions", body, JSON)
        origin = Origin.of(f"http://127.0.0.1:{port}")
        async with pool.asked(origin, request, 60.0) as answer:
            async for data in answer.chunks(60.0):
                now_ns = time.monotonic_ns()
                sent = [int(each) for each in SENT.findall(data)]
                delays.extend((now_ns - sent_ns) / 1e6 for sent_ns in sent)

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(one(number))
    pool.close()
    return delays


def idle(scale: Scale) -> list[Row]:
    """Streams that have begun, and say nothing: resident memory of the process that forwards."""
    with engine(2, 3600.0) as direct, ours(direct) as (port, pid):
        memory_mb = asyncio.run(_idle_mb(port, pid, scale.idle_streams))
    return [
        Bounded(f"{scale.idle_streams} idle streams", memory_mb, 300.0, "MB", 300.0, lower=True)
    ]


async def _idle_mb(port: int, pid: int, streams: int) -> float:
    pool = HttpPool(PoolLimits(max_connections=streams))
    begun, hold = 0, asyncio.Event()

    async def one(number: int) -> None:
        nonlocal begun
        body = json.dumps({"model": "default", "prompt": [number, 2, 3], "stream": True}).encode()
        request = Request("POST", "/v1/completions", body, JSON)
        async with pool.asked(Origin.of(f"http://127.0.0.1:{port}"), request, 60.0) as answer:
            await anext(answer.chunks(60.0))
            begun += 1
            await hold.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(one(number))
            if number % 50 == 0:
                await asyncio.sleep(0.02)
        while begun < streams:
            await asyncio.sleep(0.05)
        memory_mb = _resident_mb(pid)
        hold.set()
    pool.close()
    return memory_mb


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
