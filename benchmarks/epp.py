"""The endpoint picker behind a real Envoy: what a request costs there.

    PYTHONPATH=tests python benchmarks/epp.py [--quick] [--json] [--only rate,added,…] [--write]
    PYTHONPATH=tests python benchmarks/epp.py --undecided PORT ADDRESS    # the picker beside it

Envoy (`--concurrency 1`; $ENVOY, or what `make test-gateway` installs), a trivial engine and the
client share one core; the router with its picker, which reads, places and books each request, has
the other. The peer is a picker with the same gRPC that decides nothing, and names one address;
where a row says so, it is Envoy without a picker. `chrt -f 1` in front keeps other work off.
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
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import uvloop
from command_line import section_parser
from events_processes import free_port, pin
from forward_servers import MODEL, OTHER_CORE, PATH, SERVER_CORE, Served, engine, until_served
from msgspec import Struct
from report import Benchmark, Section, report
from rows import Row
from service_load import Address, Load, Script, request, run_load
from timing import Bounded

from router.forward.picker.answers import Route
from router.forward.picker.grpc_connection import GrpcConnection, GrpcStream
from router.forward.picker.stream import PickerStream, StreamLimits
from router.runtime.http_server.limits import HttpLimits
from support.fleets.gateways import bootstrap

SECTIONS = {
    "rate": "requests a second, 2 KB of token ids, 16 at once",
    "added": "added to a request of 2 KB, p50, one at a time",
    "long": "processor time of the picker for 450 KB of token ids that it has seen but for the end",
    "events": "processor time of the picker for an event of an answer that a gateway sends it",
}
ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 16
SHORT_TOKENS, LONG_TOKENS = 400, 90_000
GOALS = {"rate": 1800.0, "processor": 480.0, "added": 1150.0, "long": 6000.0, "event": 80.0}
EVENTS, EVENT_S = 100, 0.002
UNDECIDED = "--undecided"


class Scale(Struct, frozen=True):
    """How much is measured."""

    is_quick: bool

    @property
    def rounds(self) -> int:
        return 5

    @property
    def requests(self) -> int:
        return 400 if self.is_quick else 2_000

    def __str__(self) -> str:
        return f"medians of {self.rounds} interleaved rounds of {self.requests} requests"


class Sides(Struct, frozen=True):
    """Envoys: alone, with a picker, with one that decides nothing; and the processes of both."""

    alone: Served
    picked: Served
    undecided: Served
    picker: Served
    other: Served


@contextmanager
def sides(chunks: int = 0, response_body: str = "NONE") -> Iterator[Sides]:
    """Run an engine, a router with a picker, a picker that decides nothing, and three Envoys.

    `chunks`: of streamed answers. `response_body`: the mode of the Envoy with the picker.
    """
    with TemporaryDirectory() as folder, ExitStack() as stack:
        direct = stack.enter_context(engine(chunks, EVENT_S))
        picker_port, router_port, other_port = free_port(), free_port(), free_port()
        echo = [sys.executable, __file__, UNDECIDED, str(other_port), f"127.0.0.1:{direct.port}"]
        other = Served(other_port, (_started(stack, echo, SERVER_CORE),))
        command = [
            sys.executable, "-m", "router", "serve", "--no-use-kv-events", "--no-epp-tls",
            "--http-port", str(router_port), "--epp-port", str(picker_port), "--log-level", "error",
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
            envoy = [_envoy(), "-c", str(path), "--concurrency", "1"]
            envoy += ["--use-dynamic-base-id", "--log-level", "error"]
            served.append(Served(port, (_started(stack, envoy, OTHER_CORE),)))
            _until(f"http://127.0.0.1:{admin}/ready")
            until_served(port, {"prompt": [1, 2, 3]})
        yield Sides(*served, picker, other)


def _envoy() -> str:
    return os.environ.get("ENVOY") or str(ROOT / ".gateway-venv/bin/envoy")


def _started(stack: ExitStack, command: list[str], core: int) -> int:
    process = subprocess.Popen(
        command, preexec_fn=lambda: pin(core), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process.pid


def _until(url: str) -> None:
    deadline_s = time.monotonic() + 300.0
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError(url)


def _script(tokens: int, number: int) -> Script:
    """Return a request whose last tokens are new, and whose first ones are those of all others."""
    prompt = [*(each * 37 % 50_000 for each in range(tokens - 1)), 1000 + number % 100_000]
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()
    return ((request(PATH, body, "application/json"),),)


class Measured(Struct, frozen=True):
    """The rounds of one Envoy, and the processor time of its picker for a request, in µs."""

    loads: list[Load]
    spent: list[float]

    @property
    def per_s(self) -> float:
        return median(load.per_s for load in self.loads)

    @property
    def p50_us(self) -> float:
        return 1e6 * median(load.p50_s() for load in self.loads)

    @property
    def spent_us(self) -> float:
        return median(self.spent)


def _rounds(
    found: Sides, rounds: int, requests: int, tokens: int, at_once: int
) -> tuple[Measured, Measured, Measured]:
    """Return what was measured with the picker, with the other one and alone, in turn."""
    sides = (found.picked, found.picker), (found.undecided, found.other), (found.alone, found.other)
    measured = tuple(Measured([], []) for _ in sides)
    for number in range(rounds + 1):
        scripts = [_script(tokens, number * requests + each) for each in range(requests)]
        for kept, (envoy, picker) in zip(measured, sides, strict=True):
            before_s = picker.processor_s
            load = run_load([Address(envoy.port)], scripts, at_once)
            if load.refusals:
                raise RuntimeError(f"{load.refusals[0].answer[:300]!r}")
            if number:
                kept.loads.append(load)
                kept.spent.append(1e6 * (picker.processor_s - before_s) / requests)
    own, other, alone = measured
    return own, other, alone


def rate(scale: Scale) -> list[Row]:
    """Return requests a second, and the picker's processor time of one."""
    with sides() as found:
        own, other, alone = _rounds(found, scale.rounds, scale.requests, SHORT_TOKENS, AT_ONCE)
    goal = GOALS["processor"]
    return [
        Bounded("requests", own.per_s, other.per_s, "1/s", GOALS["rate"], lower=False),
        Bounded("beside Envoy alone", own.per_s, alone.per_s, "1/s", GOALS["rate"], lower=False),
        Bounded("processor of the picker", own.spent_us, other.spent_us, "µs", goal, lower=True),
    ]


def added(scale: Scale) -> list[Row]:
    """Return what the picker adds to the median time of a request."""
    with sides() as found:
        requests = scale.requests // 4
        own, other, alone = _rounds(found, scale.rounds, requests, SHORT_TOKENS, 1)
    more = [side.p50_us - alone.p50_us for side in (own, other)]
    goal = GOALS["added"]
    return [
        Bounded("added", *more, "µs", goal, lower=True),
        Bounded("processor, one at a time", own.spent_us, other.spent_us, "µs", goal, lower=True),
    ]


def long(scale: Scale) -> list[Row]:
    """Return the picker's processor time of a long prompt."""
    with sides() as found:
        own, other, _ = _rounds(found, scale.rounds, 40, LONG_TOKENS, 2)
    goal = GOALS["long"]
    return [Bounded("450 KB of token ids", own.spent_us, other.spent_us, "µs", goal, lower=True)]


def events(scale: Scale) -> list[Row]:
    """Return the picker's processor time of an event that is sent back unread."""
    spent = []
    for mode in ("NONE", "FULL_DUPLEX_STREAMED"):
        with sides(EVENTS, mode) as found:
            rounds = [asyncio.run(_streamed(found)) for _ in range(scale.rounds + 1)]
            spent.append(median(rounds[1:]))
    each = max(0.0, spent[1] - spent[0]) / EVENTS
    goal = GOALS["event"]
    return [Bounded("an event, of 100", each, goal, "µs", goal, lower=True)]


async def _streamed(found: Sides) -> float:
    """Have answers streamed at once. Returns the picker's processor time for one, in µs."""
    url = f"http://127.0.0.1:{found.picked.port}{PATH}"
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1, "stream": True}
    async with httpx.AsyncClient(timeout=60) as client:
        before_s = found.picker.processor_s
        answers = await asyncio.gather(*(client.post(url, json=body) for _ in range(AT_ONCE)))
        spent_s = found.picker.processor_s - before_s
    if any(answer.text.count("data:") != EVENTS + 1 for answer in answers):
        raise RuntimeError(answers[0].text[:300])
    return 1e6 * spent_s / AT_ONCE


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


MEASURE = {"rate": rate, "added": added, "long": long, "events": events}


def main() -> int:
    if sys.argv[1:2] == [UNDECIDED]:
        uvloop.run(undecided(int(sys.argv[2]), sys.argv[3]))
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    scale = Scale(arguments.quick)
    chosen = {
        name: Section(SECTIONS[name], partial(MEASURE[name], scale)) for name in arguments.only
    }
    facts = {"envoy": "1.40.0, one worker thread, without TLS"}
    return report(chosen, Benchmark("epp", "undecided", str(scale), facts), arguments)


if __name__ == "__main__":
    sys.exit(main())
