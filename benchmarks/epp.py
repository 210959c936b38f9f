"""The endpoint picker behind a real Envoy: what a request costs there, beside Envoy alone.

    PYTHONPATH=tests python benchmarks/epp.py [--quick] [--json] [--only rate,added,long] [--write]

Envoy (`--concurrency 1`; $ENVOY, or what `make test-gateway` installs), a trivial engine and the
client share one core; the router with its picker, which reads, places and books each request, has
the other. The peer is Envoy without a picker, or the goal where there is none.
`chrt -f 1 python benchmarks/epp.py` keeps other work off.
"""

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
from command_line import section_parser
from events_processes import free_port, pin
from forward_servers import MODEL, OTHER_CORE, PATH, SERVER_CORE, Served, engine, until_served
from msgspec import Struct
from report import Benchmark, Section, report
from rows import Row
from service_load import Address, Load, Script, request, run_load
from timing import Bounded

from support.fleets.gateways import bootstrap

SECTIONS = {
    "rate": "requests a second, 2 KB of token ids, 16 at once",
    "added": "added to a request of 2 KB, p50, one at a time",
    "long": "processor time of the picker for 450 KB of token ids that it has seen but for the end",
}
ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 16
SHORT_TOKENS, LONG_TOKENS = 400, 90_000
GOALS = {"rate": 1800.0, "processor": 480.0, "added": 1150.0, "long": 6000.0}


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
    """Envoy alone, and Envoy with a picker; `picker`: the process of the latter."""

    alone: Served
    picked: Served
    picker: Served


@contextmanager
def sides() -> Iterator[Sides]:
    """Run an engine, a router with a picker, and two Envoys."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        direct = stack.enter_context(engine())
        picker_port, router_port = free_port(), free_port()
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
        for has_picker in (False, True):
            port, admin = free_port(), free_port()
            config = bootstrap(
                port,
                admin,
                picker_port,
                [f"127.0.0.1:{direct.port}"],
                has_picker=has_picker,
                has_tls=False,
                is_checked=False,
                has_log=False,
            )
            path = Path(folder) / f"envoy-{port}.json"
            path.write_text(json.dumps(config))
            envoy = [_envoy(), "-c", str(path), "--concurrency", "1"]
            envoy += ["--use-dynamic-base-id", "--log-level", "error"]
            served.append(Served(port, (_started(stack, envoy, OTHER_CORE),)))
            _until(f"http://127.0.0.1:{admin}/ready")
            until_served(port, {"prompt": [1, 2, 3]})
        yield Sides(*served, picker)


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


def _rounds(
    found: Sides, rounds: int, requests: int, tokens: int, at_once: int
) -> tuple[list[Load], list[Load], list[float]]:
    """Return the loads of Envoy alone and with the picker, by round, and the picker's µs each."""
    alone, picked, spent = [], [], []
    for number in range(rounds + 1):
        scripts = [_script(tokens, number * requests + each) for each in range(requests)]
        for kept, side in ((alone, found.alone), (picked, found.picked)):
            before_s = found.picker.processor_s
            load = run_load([Address(side.port)], scripts, at_once)
            if load.refusals:
                raise RuntimeError(f"{load.refusals[0].answer[:300]!r}")
            kept.append(load)
        spent.append(1e6 * (found.picker.processor_s - before_s) / requests)
    return alone[1:], picked[1:], spent[1:]


def rate(scale: Scale) -> list[Row]:
    """Return requests a second, and the picker's processor time of one."""
    with sides() as found:
        alone, picked, spent = _rounds(found, scale.rounds, scale.requests, SHORT_TOKENS, AT_ONCE)
    rates = [median(load.per_s for load in side) for side in (picked, alone)]
    goal = GOALS["processor"]
    return [
        Bounded("with the picker", *rates, "1/s", GOALS["rate"], lower=False),
        Bounded("processor of the picker", median(spent), goal, "µs", goal, lower=True),
    ]


def added(scale: Scale) -> list[Row]:
    """Return what the picker adds to the median time of a request."""
    with sides() as found:
        alone, picked, spent = _rounds(found, scale.rounds, scale.requests // 4, SHORT_TOKENS, 1)
    each = zip(picked, alone, strict=True)
    more = 1e6 * median(one.p50_s() - other.p50_s() for one, other in each)
    base = 1e6 * median(load.p50_s() for load in alone)
    return [
        Bounded("beside Envoy alone", more, base, "µs", GOALS["added"], lower=True),
        Bounded("processor, one at a time", median(spent), base, "µs", GOALS["added"], lower=True),
    ]


def long(scale: Scale) -> list[Row]:
    """Return the picker's processor time of a long prompt."""
    with sides() as found:
        _, _, spent = _rounds(found, scale.rounds, 20, LONG_TOKENS, 2)
    goal = GOALS["long"]
    return [Bounded("450 KB of token ids", median(spent), goal, "µs", goal, lower=True)]


MEASURE = {"rate": rate, "added": added, "long": long}


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    scale = Scale(arguments.quick)
    chosen = {
        name: Section(SECTIONS[name], partial(MEASURE[name], scale)) for name in arguments.only
    }
    facts = {"envoy": "1.40.0, one worker thread, without TLS"}
    return report(chosen, Benchmark("epp", "beside it", str(scale), facts), arguments)


if __name__ == "__main__":
    sys.exit(main())
