"""An outside check: our simulator and policies beside NVIDIA's own replay of the same trace.

    python benchmarks/replay.py TRACE [--limit N] [--workers 16,4,2]

NVIDIA's is `run_mocker_trace_replay` of PyPI's `ai-dynamo-runtime` 1.6.1, offline, as it comes; our
engines are simulated with its timing (`MockerTiming`). Held against it are our simulator's time
to first token and hit rate, each decision of our policy `dynamo-1.6`, and mean time to first token
with our policy `predictive`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from replay_decisions import agreement_with
from replay_run import run_peer

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
MODES = {"round_robin": "round-robin", "kv_router": "dynamo-1.6"}


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        lines = arguments.trace.read_bytes().splitlines()[: arguments.limit]
        trace = _written(Path(folder) / "trace.jsonl", lines)
        whole = _written(Path(folder) / "whole.jsonl", [_whole(line) for line in lines])
        print(f"{len(lines):,} requests\n{'':<36}{'ours':>9}{'there':>9}{'ratio':>8}")
        holds = [_compared(trace, workers, arguments.speed) for workers in arguments.workers]
        holds += [_decided(whole, workers, arguments.speed) for workers in arguments.workers]
    return 0 if all(holds) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="in Mooncake's format, blocks of 512 tokens")
    parser.add_argument("--limit", type=int, help="so many of its requests; by default all")
    parser.add_argument("--speed", type=float, default=1.0, help="of arrivals")
    parser.add_argument("--workers", type=_numbers, default=[16, 4, 2], help="16,4,2")
    return parser.parse_args()


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


def _compared(path: Path, workers: int, speed: float) -> bool:
    """Print both simulators' figures; do they agree, and is `predictive` no worse?"""
    trace, holds = _read(path), True
    for mode, policy in MODES.items():
        peer = run_peer(
            path, path.parent, workers=workers, mode=mode, speed=speed, blocks=BLOCKS
        ).figures
        ours = _simulated(trace, policy, workers, speed)
        name = f"{workers} workers, {policy}"
        ttft_ms, hit = 1e3 * ours.ttft_mean_s, 100 * ours.hit_rate
        holds &= _line(f"{name}, TTFT, ms", ttft_ms, peer["mean_ttft_ms"], WITHIN)
        there = 100 * peer["prefix_cache_reused_ratio"]
        holds &= _line(f"{name}, hits, %", hit, there, WITHIN)
    best = _simulated(trace, "predictive", workers, speed)
    beside = (1e3 * best.ttft_mean_s, 1e3 * ours.ttft_mean_s)
    return holds & _line(f"{workers} workers, predictive / dynamo-1.6", *beside, None)


def _line(name: str, ours: float, there: float, within: float | None) -> bool:
    ratio = ours / there
    holds = ratio <= 1 if within is None else abs(ratio - 1) <= within
    print(f"{name:<36}{ours:>9.1f}{there:>9.1f}{ratio:>8.3f}{'' if holds else '  NO'}", flush=True)
    return holds


def _simulated(trace: Trace, policy: str, workers: int, speed: float) -> Summary:
    model = MockerTiming(capacity_tokens=BLOCKS * BLOCK_SIZE)
    scenario = Scenario(models=(model,) * workers, arrival_speed=speed, event_lag_s=0.0)
    router = named_policy(Spec(policy, policy, {}), default_settings())
    return summarize(simulate(trace, scenario, router.make_core))


def _decided(path: Path, workers: int, speed: float) -> bool:
    """Print how many of its router's decisions are ours; are all?"""
    run = run_peer(
        path, path.parent, workers=workers, mode="kv_router", speed=speed, blocks=ROOMY_BLOCKS
    )
    agreement = agreement_with(_read(path), run, workers, ROOMY_BLOCKS)
    print(
        f"{workers} workers: {agreement.workers:,} of {agreement.decisions:,} decisions are the "
        f"same, {agreement.costs:,} at the same cost",
        flush=True,
    )
    return agreement.decisions == agreement.workers == agreement.costs > 0


if __name__ == "__main__":
    sys.exit(main())
