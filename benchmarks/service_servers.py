"""The two servers: real processes, kept on one core, the same for both."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
from conformance.environments import python_of
from direct_router import processor_s_of
from events_processes import free_port, pin
from peer import PYTHON, REQUIREMENTS, VENV

SERVER_CORE, GENERATOR_CORE = 0, 1
PEER_THREADS = 2
START_S = 300.0  # kernels may have to be compiled first


class ServerProcess:
    """A server that answers on a port of this machine."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._process = process

    @property
    def processor_s(self) -> float:
        """Processor time so far, of all its threads."""
        return processor_s_of(self._process.pid)

    @property
    def resident_bytes(self) -> int:
        """Memory it has."""
        with open(f"/proc/{self._process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def our_server(nats_url: str = "") -> Iterator[ServerProcess]:
    """`kv-router serve`, without a bus unless one is named."""
    port = free_port()
    command = [sys.executable, "-m", "router", "serve", "--http-port", str(port)]
    command += ["--nats-url", nats_url] if nats_url else []
    with _running("ours", [*command, "--log-level", "error"], port, os.environ) as server:
        yield server


@contextmanager
def peer_server() -> Iterator[ServerProcess]:
    """Dynamo's selection service."""
    python_of(VENV, REQUIREMENTS)
    port = free_port()
    command = [str(PYTHON), "-m", "dynamo.select_service", "--threads", str(PEER_THREADS)]
    environment = {**os.environ, "DYN_LOG": "error"}
    environment.pop("PYTHONPATH", None)
    with _running("peer", [*command, "--port", str(port)], port, environment) as server:
        yield server


@contextmanager
def _running(
    name: str, command: Sequence[str], port: int, environment: Mapping[str, str]
) -> Iterator[ServerProcess]:
    process = subprocess.Popen(command, env=environment, preexec_fn=lambda: pin(SERVER_CORE))
    try:
        server = ServerProcess(name, process, port)
        _wait_until_served(server)
        yield server
    finally:
        process.terminate()
        process.wait(START_S)


def _wait_until_served(server: ServerProcess) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            httpx.get(f"{server.url}/health")
        except httpx.TransportError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            return
