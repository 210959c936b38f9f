"""NVIDIA's replay of a trace, run in its environment, and what it wrote of each request."""

import json
import os
import re
import subprocess
from pathlib import Path

from conformance.environments import python_of
from msgspec import Struct
from msgspec import json as fast_json
from peer import HERE, REQUIREMENTS, VENV

FIGURES = ("mean_ttft_ms", "median_ttft_ms", "prefix_cache_reused_ratio", "mean_e2e_latency_ms")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DECISION = re.compile(r"request_id=\"([^\"]+)\" worker_id=(\d+) .* logit=([-\d.e]+) ")


class Served(Struct, frozen=True):
    """One request of the report; times in milliseconds from the start."""

    uuid: str
    arrival_time_ms: float
    first_token_ms: float
    last_token_ms: float
    input_length: int
    routing_history: list["Routed"]


class Routed(Struct, frozen=True):
    """Where a request went, and the blocks it found there."""

    logical_worker_id: int
    selected_overlap_blocks: int | None = None


class Decision(Struct, frozen=True):
    """What its router said of a choice."""

    request_id: str
    worker_id: int
    logit: float


class PeerRun(Struct, frozen=True):
    """Figures of the whole; of each request, if the router decided, what was decided, in order."""

    figures: dict[str, float]
    served: dict[str, Served]
    decisions: list[Decision]


def run_peer(
    trace: Path, folder: Path, *, workers: int, mode: str, speed: float, blocks: int
) -> PeerRun:
    """Replay a trace over `workers` workers, each with `blocks` blocks of 512 tokens."""
    report = folder / f"{mode}-{workers}-{speed:g}.jsonl"
    wanted = {
        "trace": str(trace),
        "workers": workers,
        "mode": mode,
        "speed": speed,
        "blocks": blocks,
        "report": str(report),
        "figures": FIGURES,
    }
    done = subprocess.run(
        [python_of(VENV, REQUIREMENTS), HERE / "replay_peer.py", json.dumps(wanted)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "DYN_LOG": "info"},
    )
    served = [fast_json.decode(line, type=Served) for line in report.read_bytes().splitlines()]
    return PeerRun(
        json.loads(done.stdout), {each.uuid: each for each in served}, _decisions(done.stderr)
    )


def _decisions(log: str) -> list[Decision]:
    found = (_DECISION.search(_COLOURS.sub("", line)) for line in log.splitlines())
    return [Decision(each[1], int(each[2]), float(each[3])) for each in found if each]
