"""The two servers: real processes, kept on one core, the same for both."""

import os
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
from conformance.environments import python_of, shipped_python
from direct_router import processor_s_of
from events_processes import free_port, pin
from msgspec import Struct
from peer import PYTHON, REQUIREMENTS, VENV
from service_load import Address

SERVER_CORE, GENERATOR_CORE = 0, 1
PEER_THREADS = 2
START_S = 300.0  # kernels may have to be compiled first


class Access(Struct, frozen=True):
    """How a server is asked as an operator asks. `authorities`: a PEM file, for TLS."""

    headers: dict[str, str] = {}
    authorities: str = ""


OPEN = Access()


class ServerProcess:
    """A server that answers on a port of this machine."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], port: int, access: Access
    ) -> None:
        self.name = name
        self.url = f"{'https' if access.authorities else 'http'}://127.0.0.1:{port}"
        self.address = Address(port, access.authorities)
        self._access = access
        self._process = process

    def client(self) -> httpx.Client:
        """A client that may ask it anything."""
        tls = ssl.create_default_context(cafile=self._access.authorities or None)
        return httpx.Client(
            base_url=self.url, headers=self._access.headers, verify=tls, timeout=60.0
        )

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
def our_server(*settings: str, access: Access = OPEN) -> Iterator[ServerProcess]:
    """`kv-router serve` as in its image, with further settings as flags; without a bus unless they
    name one.
    """
    port = free_port()
    command = [str(shipped_python()), "-m", "router", "serve", "--http-port", str(port)]
    command += ["--log-level", "error", *settings]
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    with _running("ours", command, port, environment, access) as server:
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
    name: str,
    command: Sequence[str],
    port: int,
    environment: Mapping[str, str],
    access: Access = OPEN,
) -> Iterator[ServerProcess]:
    process = subprocess.Popen(command, env=environment, preexec_fn=lambda: pin(SERVER_CORE))
    try:
        server = ServerProcess(name, process, port, access)
        _wait_until_served(server, process)
        yield server
    finally:
        process.terminate()
        process.wait(START_S)


def _wait_until_served(server: ServerProcess, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            with server.client() as client:
                client.get("/health")
        except httpx.TransportError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            return
