"""The router of a measurement: the real process, without a bus, on one core. Or the peer's."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
import numpy as np
from conformance.environments import python_of
from events_processes import READER_CORE, free_port, pin
from peer import REQUIREMENTS, VENV

from router.sequence.hashing.block_hashes import TokenArray, chain, local_block_hashes

START_S = 30.0
_SCHEDULED = 2
_SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


def processor_s_of(pid: int) -> float:
    """Processor time of a process so far, of all its threads, to the nanosecond: /proc has
    hundredths of a second.
    """
    clock = (~pid << 3) | _SCHEDULED  # as clock_getcpuclockid(3) of Linux names it
    return time.clock_gettime(clock)


class DirectRouter:
    """A `kv-router serve`, or a selection service, to which workers are registered over HTTP."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process = process
        self.client = httpx.Client(base_url=url, timeout=60.0)
        self.url = url

    @property
    def processor_s(self) -> float:
        """Processor time so far, of all its threads."""
        return processor_s_of(self._process.pid)

    def register(
        self, worker_id: int, events: str, replay: str, block_size: int, num_blocks: int = 0
    ) -> None:
        """A worker of one rank, with a pool of `blocks` blocks; 0: unknown."""
        body = {
            "worker_id": worker_id,
            "endpoint": f"http://worker-{worker_id}:8000",
            "block_size": block_size,
            "kv_events_endpoint": events,
            "replay_endpoint": replay,
            "total_kv_blocks": num_blocks,
        }
        self.client.post("/workers", json=body).raise_for_status()

    def remove(self, worker_id: int) -> None:
        """Forget it."""
        self.client.delete(f"/workers/{worker_id}").raise_for_status()

    def holds(self, worker_id: int, prompt: TokenArray, block_size: int) -> bool:
        """Return whether this worker is credited with all of a prompt, as a caller would see it."""
        local_hashes = local_block_hashes(prompt, block_size)
        body = {
            "block_hashes": local_hashes.view(np.int64).tolist(),
            "sequence_hashes": chain(local_hashes).view(np.int64).tolist(),
            "isl_tokens": len(prompt),
        }
        reply = self.client.post("/overlap_scores", json=body).raise_for_status().json()
        found = (each for each in reply["workers"] if each["worker_id"] == worker_id)
        return any(each["device_blocks"] == len(local_hashes) for each in found)

    def samples(self, name: str, **labels: str) -> dict[str, float]:
        """The metric's samples with these labels, by all of their labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return {
            found: float(value)
            for sample, found, value in _SAMPLE.findall(self.client.get("/metrics").text)
            if sample == name and all(each in found for each in wanted)
        }

    def total(self, name: str, **labels: str) -> float:
        """Their sum."""
        return sum(self.samples(name, **labels).values())


@contextmanager
def running_router() -> Iterator[DirectRouter]:
    """Start ours, and stop it afterwards."""
    command = [sys.executable, "-m", "router", "serve", "--log-level", "error", "--http-port"]
    with _running(command, dict(os.environ)) as router:
        yield router


@contextmanager
def running_peer() -> Iterator[DirectRouter]:
    """Start Dynamo's selection service as it comes, and stop it afterwards."""
    python = str(python_of(VENV, REQUIREMENTS))
    environment = {**os.environ, "DYN_LOG": "error"}
    environment.pop("PYTHONPATH", None)
    with _running([python, "-m", "dynamo.select_service", "--port"], environment) as peer:
        yield peer


@contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[DirectRouter]:
    port = free_port()
    process = subprocess.Popen(
        [*command, str(port)], env=environment, preexec_fn=lambda: pin(READER_CORE)
    )
    try:
        router = DirectRouter(process, f"http://127.0.0.1:{port}")
        _wait_until_served(router)
        yield router
        router.client.close()
    finally:
        process.terminate()
        process.wait(START_S)


def _wait_until_served(router: DirectRouter) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            router.client.get("/health")
        except httpx.TransportError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            return
