"""A whole router as a process of its own, asked over HTTP."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from events_processes import READER_CORE, free_port, pin

from router.protocol.replies import TrustState


class RouterProcess:
    """What a router says of a worker."""

    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5)

    def close(self) -> None:
        """Ask nothing more."""
        self._client.close()

    def is_exact(self, worker_id: int) -> bool:
        """Whether it vouches for the worker's only rank."""
        return self._trust(worker_id)[0] == TrustState.EXACT

    def shows(self, worker_id: int, event_id: int) -> bool:
        """Whether it stands at this event, or behind it."""
        return self._trust(worker_id)[1] >= event_id

    def _trust(self, worker_id: int) -> tuple[str, int]:
        try:
            answer = self._client.get(f"/workers/{worker_id}")
        except httpx.HTTPError:
            return TrustState.BLIND, -1
        if answer.status_code != httpx.codes.OK:
            return TrustState.BLIND, -1
        trust = answer.json()["ranks"][0]["trust"]
        return trust["state"], trust["event_id"]


@contextmanager
def running_router(nats_url: str, namespace: str) -> Iterator[RouterProcess]:
    """A router on this bus, killed afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "router", "serve", "--nats-url", nats_url]
    process = subprocess.Popen(
        [*command, "--namespace", namespace, "--http-port", str(port), "--name", "bench"],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: pin(READER_CORE),
    )
    router = RouterProcess(port)
    try:
        yield router
    finally:
        router.close()
        process.send_signal(signal.SIGKILL)
        process.wait()
