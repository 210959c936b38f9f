"""The endpoint picker behind a real Envoy: what a request costs there.

    PYTHONPATH=tests python benchmarks/epp.py [--quick] [--json] [--only rate,added,…] [--write]

Envoy (`--concurrency 1`; $ENVOY, or what `make test-gateway` installs), a trivial engine and the
client share one core; the router with its picker, which reads, places and books each request, has
the other. The peer is a picker with the same gRPC that decides nothing, and names one address;
where a row says so, it is Envoy without a picker. `chrt -f 1` in front keeps other work off.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, median
from tempfile import TemporaryDirectory

import httpx
from command_line import section_parser
from epp_sides import Sides, sides
from forward_servers import MODEL, PATH
from msgspec import Struct
from msgspec.structs import replace
from report import Benchmark, Section, report
from rows import Row
from scheduling_runs import Case, core_of
from service_load import Address, Load, Script, request, run_load
from timing import Bounded
from tokenizers import Tokenizer
from tokenizing import BOOKS, train

from router.config.router import RouterConfig
from router.forward.request_body import CompletionRequest, read_completion_request
from router.forward.tokenizer.files import read_files
from router.forward.tokenizer.local import LocalTokenizer
from router.forward.tokenizer.token_cache import TokenCache
from router.simulator.mooncake import BLOCK_SIZE
from router.simulator.physics import PHYSICS
from router.simulator.simulation import simulate
from router.simulator.summary import summarize
from router.simulator.traces import Trace
from router.simulator.workloads.timed import Agents, MultiTurn, SharedPrompts

SECTIONS = {
    "rate": "requests a second, 2 KB of token ids, 16 at once",
    "added": "added to a request of 2 KB, p50, one at a time",
    "long": "processor time of the picker for long prompts of token ids, seen but for the end",
    "texts": "processor time of the picker for 450 KB of text, about 100,000 tokens",
    "events": "processor time of the picker for an event of an answer that a gateway sends it",
    "pickers": "mean TTFT in the simulator, requests alternating between two pickers; beside one",
}
AT_ONCE = 16
SHORT_TOKENS = 400
LONG_TOKENS = {"450 KB": 78_000, "1 MB": 173_000}
TEXT_BYTES, NEW_BYTES = 450_000, 4_000
GOALS = {"rate": 1800.0, "processor": 480.0, "added": 1150.0, "event": 80.0, "pickers": 1.05}
LONG_GOAL_US = {"450 KB": 6_000.0, "1 MB": 13_300.0}
PUBLISHED_US = 35.17 / 98.7 * 1e6
"""llm-d's picker 0.9.0, the least of its table at 100,000 tokens and 98.7 requests/s
(`docs/operations.md` of llm-d-router): cores at the peak, through all of an answer of 1,000 tokens,
with the metrics of 100 pods scraped and approximate prefixes, of a simulated engine."""
SYNC_LAG_S = 0.002
"""The time in which a picker's bookings reach another one."""
EVENTS = 100


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


def _ids(tokens: int, number: int) -> Script:
    """Return a request whose last tokens are new, and whose first ones are those of all others."""
    return _script([*(each * 37 % 50_000 for each in range(tokens - 1)), 1000 + number % 100_000])


_short = partial(_ids, SHORT_TOKENS)


def _script(prompt: object) -> Script:
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    body = json.dumps(fields, separators=(",", ":")).encode()
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
    found: Sides, rounds: int, requests: int, script: Callable[[int], Script], at_once: int
) -> tuple[Measured, Measured, Measured]:
    """Return what was measured with the picker, with the other one and alone, in turn."""
    sides = (found.picked, found.picker), (found.undecided, found.other), (found.alone, found.other)
    measured = tuple(Measured([], []) for _ in sides)
    for number in range(rounds + 1):
        scripts = [script(number * requests + each) for each in range(requests)]
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
        own, other, alone = _rounds(found, scale.rounds, scale.requests, _short, AT_ONCE)
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
        own, other, alone = _rounds(found, scale.rounds, requests, _short, 1)
    more = [side.p50_us - alone.p50_us for side in (own, other)]
    goal = GOALS["added"]
    return [
        Bounded("added", *more, "µs", goal, lower=True),
        Bounded("processor, one at a time", own.spent_us, other.spent_us, "µs", goal, lower=True),
    ]


def long(scale: Scale) -> list[Row]:
    """Return the picker's processor time of long prompts."""
    rows: list[Row] = []
    with sides() as found:
        for name, tokens in LONG_TOKENS.items():
            own, other, _ = _rounds(found, scale.rounds, 40, partial(_ids, tokens), 2)
            goal = LONG_GOAL_US[name]
            rows.append(Bounded(name, own.spent_us, other.spent_us, "µs", goal, lower=True))
    return rows


def texts(scale: Scale) -> list[Row]:
    """Return the picker's processor time of long texts, apart from the tokenizer's own."""
    written = Texts()
    with TemporaryDirectory() as folder:
        train(Path(folder), BOOKS.read_text())
        with sides(tokenizer=folder) as found:
            _until_tokenized(found)
            seen, other, _ = _rounds(found, scale.rounds, 20, lambda _: written.seen(), 2)
            new, _, _ = _rounds(found, scale.rounds, 10, lambda _: written.unseen(), 2)
        own, library = _tokenizing_us(Path(folder), written, scale.rounds)
    goal = LONG_GOAL_US["450 KB"]
    return [
        Bounded("seen but for 4 KB", seen.spent_us, other.spent_us, "µs", goal, lower=True),
        Bounded("never seen", new.spent_us, other.spent_us, "µs", goal + own, lower=True),
        Row("its tokenizer alone; the library's", own, library, "µs", 1.0, lower=True),
        Row("never seen; llm-d's, published", new.spent_us, PUBLISHED_US, "µs", 1.0, lower=True),
    ]


def _tokenizing_us(folder: Path, written: "Texts", rounds: int) -> tuple[float, float]:
    """Return the processor time of tokenizing a new text: the picker's way, and the library's."""
    local = LocalTokenizer(read_files(str(folder)), TokenCache(8_000_000))
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 2):  # the first ones make the tokens of words
        text = written.text()
        spent[0].append(_processor_us(partial(local.packed, _completion(text))))
        spent[1].append(_processor_us(partial(library.encode, text, add_special_tokens=False)))
    return median(spent[0][2:]), median(spent[1][2:])


def _completion(text: str) -> CompletionRequest:
    return read_completion_request(PATH, json.dumps({"model": MODEL, "prompt": text}).encode())


def _processor_us(work: Callable[[], object]) -> float:
    begun_s = time.process_time()
    work()
    return 1e6 * (time.process_time() - begun_s)


class Texts:
    """Conversations as an agent sends them, in turns of 4 KB of words in an order of their own.

    Their special tokens are what a chat template writes; a tokenizer may be used anew behind each.
    """

    def __init__(self) -> None:
        self._words, self._random = BOOKS.read_text().split(), Random(3)
        self._common = self.text(TEXT_BYTES - NEW_BYTES)

    def text(self, size_bytes: int = TEXT_BYTES) -> str:
        return "".join(self._turn() for _ in range(size_bytes // NEW_BYTES))

    def _turn(self) -> str:
        words = " ".join(self._random.choices(self._words, k=NEW_BYTES // 2))
        return f"<|im_start|>user\n{words[: NEW_BYTES - 29]}<|im_end|>\n"

    def seen(self) -> Script:
        return _script(self._common + self._turn())

    def unseen(self) -> Script:
        return _script(self.text())


def _until_tokenized(found: Sides) -> None:
    """Wait until the picker tokenizes by itself: it has compared itself with the engine."""
    at, deadline_s = f"http://127.0.0.1:{found.picker.port}/metrics", time.monotonic() + 60.0
    body = {"model": MODEL, "prompt": "one two", "max_tokens": 1}
    while time.monotonic() < deadline_s:
        httpx.post(f"http://127.0.0.1:{found.picked.port}{PATH}", json=body).raise_for_status()
        if 'tokenizations_total{outcome="local"}' in httpx.get(at).text:
            return
        time.sleep(0.2)
    raise TimeoutError("the tokenizer is not used")


def pickers(scale: Scale) -> list[Row]:
    """Return the mean TTFT with two pickers, beside that with one."""
    requests, seeds = (500, 1) if scale.is_quick else (4_000, 3)
    workloads = {
        "multi-turn": MultiTurn(requests=requests),
        "agents": Agents(requests=requests),
        "shared prompts": SharedPrompts(requests=requests),
    }
    rows: list[Row] = []
    for name, workload in workloads.items():
        traces = [workload.trace(BLOCK_SIZE, Random(seed)) for seed in range(seeds)]
        one, two = (
            mean(_simulated_s(trace, count, seed) for seed, trace in enumerate(traces))
            for count in (1, 2)
        )
        rows.append(Row(name, 1e3 * two, 1e3 * one, "ms", GOALS["pickers"], lower=True))
    return rows


def _simulated_s(trace: Trace, pickers: int, seed: int) -> float:
    scenario = PHYSICS["plain"].scenario(arrival_speed=1.0, routers=pickers, seed=seed)
    scenario = replace(scenario, sync_lag_s=SYNC_LAG_S)
    case = Case(source="", policy=RouterConfig().policy.policy)
    return summarize(simulate(trace, scenario, partial(core_of, case))).ttft_mean_s


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


MEASURE = {
    "rate": rate,
    "added": added,
    "long": long,
    "texts": texts,
    "events": events,
    "pickers": pickers,
}


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    scale = Scale(arguments.quick)
    chosen = {
        name: Section(SECTIONS[name], partial(MEASURE[name], scale)) for name in arguments.only
    }
    facts = {"envoy": "1.40.0, one worker thread, without TLS"}
    return report(chosen, Benchmark("epp", "undecided", str(scale), facts), arguments)


if __name__ == "__main__":
    sys.exit(main())
