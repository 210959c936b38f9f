"""The servers of `epp.py`: Envoys with a picker, with one that decides nothing, and without.

python benchmarks/epp_sides.py PORT ADDRESS    # the picker that decides nothing
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import uvloop
from events_processes import free_port, pin
from forward_servers import MODEL, OTHER_CORE, SERVER_CORE, Served, engine, until_served
from msgspec import Struct

from router.forward.picker.answers import Route
from router.forward.picker.grpc_connection import GrpcConnection, GrpcStream
from router.forward.picker.stream import PickerStream, StreamLimits
from router.runtime.http_server.limits import HttpLimits
from support.fleets.gateways import bootstrap

ROOT = Path(__file__).resolve().parents[1]
EVENT_S = 0.002
"""The interval of the events of streamed answers."""


class Sides(Struct, frozen=True):
    """Envoys: alone, with a picker, with one that decides nothing; and the processes of both."""

    alone: Served
    picked: Served
    undecided: Served
    picker: Served
    other: Served


@contextmanager
def sides(chunks: int = 0, response_body: str = "NONE", tokenizer: str = "") -> Iterator[Sides]:
    """Run an engine, a router with a picker, a picker that decides nothing, and three Envoys.

    `chunks`: of streamed answers. `response_body`: the mode of the Envoy with the picker.
    `tokenizer`: a folder, of the engine's and the picker's tokenizer.
    """
    with TemporaryDirectory() as folder, ExitStack() as stack:
        direct = stack.enter_context(
            engine(chunks, EVENT_S, tokenizer and f"{tokenizer}/tokenizer.json")
        )
        picker_port, router_port, other_port = free_port(), free_port(), free_port()
        echo = [sys.executable, __file__, str(other_port), f"127.0.0.1:{direct.port}"]
        other = Served(other_port, (_started(stack, echo, SERVER_CORE),))
        command = [
            sys.executable, "-m", "router", "serve", "--no-use-kv-events", "--no-epp-tls",
            "--http-port", str(router_port), "--epp-port", str(picker_port), "--log-level", "error",
            *(["--tokenizer", tokenizer] if tokenizer else []),
        ]  # fmt: skip
        picker = Served(router_port, (_started(stack, command, SERVER_CORE),))
        _until(f"http://127.0.0.1:{router_port}/health")
        at = f"http://127.0.0.1:{direct.port}"
        worker = {"worker_id": 1, "endpoint": at, "block_size": 16, "model_name": MODEL}
        httpx.post(f"http://127.0.0.1:{router_port}/workers", json=worker).raise_for_status()
        served = []
        for has_picker, at_port in ((False, 0), (True, picker_port), (True, other_port)):
            port, admin = free_port(), free_port()
            config = bootstrap(
                port,
                admin,
                at_port or picker_port,
                [f"127.0.0.1:{direct.port}"],
                has_picker=has_picker,
                has_tls=False,
                is_checked=False,
                has_log=False,
                response_body=response_body if at_port == picker_port else "NONE",
            )
            path = Path(folder) / f"envoy-{port}.json"
            path.write_text(json.dumps(config))
            envoy = [envoy_binary(), "-c", str(path), "--concurrency", "1"]
            envoy += ["--use-dynamic-base-id", "--log-level", "error"]
            served.append(Served(port, (_started(stack, envoy, OTHER_CORE),)))
            _until(f"http://127.0.0.1:{admin}/ready")
            until_served(port, {"prompt": [1, 2, 3]})
        yield Sides(*served, picker, other)


def envoy_binary() -> str:
    return os.environ.get("ENVOY") or str(ROOT / ".gateway-venv/bin/envoy")


def _started(stack: ExitStack, command: list[str], core: int) -> int:
    process = subprocess.Popen(
        command, preexec_fn=lambda: pin(core), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process.pid


def _until(url: str) -> None:
    deadline_s = time.monotonic() + 100.0
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError(url)


# ── A picker that decides nothing ────────────────────────────────────────────────────────────────


class Undecided:
    """A stream that sends each request to one address."""

    limit_bytes = 1 << 26

    def __init__(self, route: Route, limits: StreamLimits, stream: GrpcStream) -> None:
        self._route, self._stream, self._state = route, stream, PickerStream(limits)

    def received(self, message: bytes) -> None:
        answers = self._state.receive(message)
        if self._state.is_complete and not self._state.is_settled:
            answers += self._state.route(self._route)
        self._stream.send(answers)

    def ended(self) -> None:
        self._stream.finish()

    def expects(self, size_bytes: int) -> None:
        """Do nothing."""

    def oversized(self) -> None:
        raise AssertionError

    def lost(self) -> None: ...


async def undecided(port: int, address: str) -> None:
    """Serve at a port until the process ends."""
    limits = StreamLimits(1 << 26, HttpLimits())
    begin = partial(Undecided, Route(address, booking="0" * 32), limits)
    services = {b"/envoy.service.ext_proc.v3.ExternalProcessor/Process": begin}
    connected = partial(GrpcConnection, services, set(), 100)
    await asyncio.get_running_loop().create_server(connected, "127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(undecided(int(sys.argv[1]), sys.argv[2]))
