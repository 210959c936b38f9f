"""An outside check: our simulator and policies beside NVIDIA's own replay of the same trace.

    python benchmarks/replay.py TRACE [--quick] [--json] [--write] [--limit N] [--workers 16,4,2]

NVIDIA's is `run_mocker_trace_replay` of PyPI's `ai-dynamo-runtime` 1.6.1, offline, as it comes; our
engines are simulated with its timing (`MockerTiming`). Held against it are our simulator's time
to first token and hit rate, each decision of our policy `dynamo-1.6`, and mean time to first token
with our policy `predictive`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from command_line import section_parser
from replay_decisions import agreement_with
from replay_run import run_peer
from report import Benchmark, Section, report
from rows import Row

from router.simulator.engine_model import MockerTiming
from router.simulator.mooncake import BLOCK_SIZE, read_mooncake
from router.simulator.scenario import Scenario
from router.simulator.simulation import simulate
from router.simulator.summary import Summary, summarize
from router.simulator.traces import Trace
from router.tools.simulate.specs import Spec, default_settings, named_policy

BLOCKS = 3_000
"""Of an engine's cache: 1.5 million tokens."""

ROOMY_BLOCKS = 100_000
WITHIN = 0.05
QUICK_REQUESTS = 1_500
SECTIONS = {
    "simulator": "our simulator beside NVIDIA's, with the same policies",
    "predictive": "`predictive` beside `dynamo-1.6`, with NVIDIA's timing",
    "decisions": "decisions of NVIDIA's router that are ours",
}
MODES = {"round_robin": "round-robin", "kv_router": "dynamo-1.6"}


class Within(Row, frozen=True):
    """Figures that have to agree. `goal`: how far the ratio may be from 1."""

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) <= self.goal


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        lines = arguments.trace.read_bytes().splitlines()[: arguments.limit]
        trace = _written(Path(folder) / "trace.jsonl", lines)
        whole = _written(Path(folder) / "whole.jsonl", [_whole(line) for line in lines])
        measure = {
            "simulator": partial(_compared, trace, arguments.speed),
            "predictive": partial(_improved, trace, arguments.speed),
            "decisions": partial(_decided, whole, arguments.speed),
        }
        chosen = {
            name: Section(SECTIONS[name], partial(_of_each, measure[name], arguments.workers))
            for name in arguments.only
        }
        scale = f"{len(lines):,} requests of {arguments.trace.name}, speed {arguments.speed:g}"
        return report(chosen, Benchmark("replay", "the peer", scale), arguments)


def _of_each(measure: Callable[[int], list[Row]], workers: Sequence[int]) -> list[Row]:
    return [row for number in workers for row in measure(number)]


def _arguments() -> argparse.Namespace:
    parser = section_parser(__doc__ or "", SECTIONS)
    parser.add_argument("trace", type=Path, help="in Mooncake's format, blocks of 512 tokens")
    parser.add_argument("--limit", type=int, help="the first requests of it; by default all")
    parser.add_argument("--speed", type=float, default=1.0, help="of arrivals")
    parser.add_argument("--workers", type=_numbers, default=[16, 4, 2], help="16,4,2")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.limit = arguments.limit or QUICK_REQUESTS
    return arguments


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _written(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines))
    return path


def _whole(line: bytes) -> bytes:
    """The same request, with its last block full."""
    fields = json.loads(line)
    fields["input_length"] = BLOCK_SIZE * len(fields["hash_ids"])
    return json.dumps(fields).encode()


def _read(path: Path) -> Trace:
    with path.open("rb") as lines:
        return read_mooncake(path.name, lines)


def _compared(path: Path, speed: float, workers: int) -> list[Row]:
    """Return both simulators' figures of the same policies, which have to agree."""
    trace, rows = _read(path), []
    for mode, policy in MODES.items():
        peer = run_peer(
            path, path.parent, workers=workers, mode=mode, speed=speed, blocks=BLOCKS
        ).figures
        ours = _simulated(trace, policy, workers, speed)
        name = f"{workers} workers, {policy}"
        ttft_ms = 1e3 * ours.ttft_mean_s
        there = 100 * peer["prefix_cache_reused_ratio"]
        rows.append(Within(f"{name}, TTFT", ttft_ms, peer["mean_ttft_ms"], "ms", WITHIN, True))
        rows.append(Within(f"{name}, hits", 100 * ours.hit_rate, there, "%", WITHIN, True))
    return rows


def _improved(path: Path, speed: float, workers: int) -> list[Row]:
    """Return `predictive` beside `dynamo-1.6`, both in our simulator."""
    trace = _read(path)
    ours, theirs = (_simulated(trace, p, workers, speed) for p in ("predictive", "dynamo-1.6"))
    return [
        Row(
            f"{workers} workers, mean {name}",
            1e3 * getattr(ours, field),
            1e3 * getattr(theirs, field),
            "ms",
            1.0,
            lower=True,
        )
        for name, field in (("TTFT", "ttft_mean_s"), ("end to end", "e2e_mean_s"))
    ]


def _simulated(trace: Trace, policy: str, workers: int, speed: float) -> Summary:
    model = MockerTiming(capacity_tokens=BLOCKS * BLOCK_SIZE)
    scenario = Scenario(models=(model,) * workers, arrival_speed=speed, event_lag_s=0.0)
    router = named_policy(Spec(policy, policy, {}), default_settings())
    return summarize(simulate(trace, scenario, router.make_core))


def _decided(path: Path, speed: float, workers: int) -> list[Row]:
    """Return how many decisions of its router are ours, and at the same cost."""
    run = run_peer(
        path, path.parent, workers=workers, mode="kv_router", speed=speed, blocks=ROOMY_BLOCKS
    )
    agreement = agreement_with(_read(path), run, workers, ROOMY_BLOCKS)
    return [
        Row(f"{workers} workers, {name}", equal, agreement.decisions, "", 1.0, lower=False)
        for name, equal in (("worker", agreement.workers), ("cost", agreement.costs))
    ]


if __name__ == "__main__":
    sys.exit(main())
