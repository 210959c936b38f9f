"""The parts of `compare.py`: which commands they are, and what became of each."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

HERE = Path(__file__).resolve().parent
QUICK_S, FULL_S = 900.0, 4 * 3600.0
"""Beyond these a command is ended: the first one may have to install its peer."""

SERVICE = ("cycle,client,httpx", "queries", "json,binary,alone", "ingest")
SERVICE_LONG = ("nats", "features", "fleet", "overload")
POLICIES = "predictive dynamo-1.6 dynamo-1.0 lmetric cache-aware round-robin"


class Part(Struct, frozen=True):
    """A script, how its figures are to be read, and beside whom they stand."""

    title: str
    peer: str
    kind: Literal["rows", "faults", "replays"]
    arguments: Sequence[str]
    sections: Sequence[str] = ()
    """Run one by one, so that one that fails costs the others nothing."""
    long_sections: Sequence[str] = ()
    """The same, but not with `--quick`."""
    needs_trace: bool = False


class Outcome(Struct, frozen=True):
    """What a command printed; `failure`: its last words, where it printed no figures."""

    part: Part
    command: str
    seconds: float
    found: Any = None
    failure: str = ""


PARTS: Mapping[str, Part] = {
    "index": Part("The index of held blocks", "Dynamo 1.6.1, RadixTree", "rows", ["index.py"]),
    "decision": Part("One decision", "Dynamo 1.6.1, SelectionService", "rows", ["decision.py"]),
    "events": Part(
        "An engine's own events",
        "Dynamo 1.6.1, select_service",
        "rows",
        ["direct.py"],
        ("peer",),
    ),
    "service": Part(
        "Booking and choosing over HTTP",
        "Dynamo 1.6.1, select_service",
        "rows",
        ["service.py"],
        SERVICE,
        SERVICE_LONG,
    ),
    "forward": Part(
        "Passing requests on", "vllm-router 0.1.17, smg 1.13.0", "rows", ["forward.py"]
    ),
    "startup": Part("Starting and resting", "Dynamo 1.6.1, select_service", "rows", ["startup.py"]),
    "faults": Part(
        "Streams and faults",
        "Dynamo 1.6.1, select_service; vllm-router 0.1.17",
        "faults",
        ["conformance.py"],
    ),
    "trace": Part(
        "A trace in virtual time",
        "formulas of Dynamo 1.0 and 1.6, LMetric, SGLang's cache-aware, in our simulator",
        "replays",
        ["-m", "router", "simulate"],
    ),
    "policies": Part(
        "A trace in virtual time, rivals tuned for it",
        "formulas of Dynamo 1.0 and 1.6, LMetric, SGLang's cache-aware, in our simulator",
        "rows",
        ["scheduling.py"],
        ("table", "policies"),
        needs_trace=True,
    ),
    "replay": Part(
        "A trace with the timing of NVIDIA's mocker",
        "NVIDIA's own replay",
        "rows",
        ["replay.py"],
        needs_trace=True,
    ),
    "published": Part(
        "What SMG and llm-d publish, simulated",
        "SGLang's rule, load, chance, or no events, in our simulator",
        "rows",
        ["published.py"],
    ),
}


def commands_of(part: Part, *, quick: bool, trace: str, write: bool = False) -> Iterator[list[str]]:
    """Yield the commands of a part; none if it needs a trace and there is no file.

    Without a file, a trace is made up. `write`: scripts keep their rows in `results`.
    """
    if part.needs_trace and not trace:
        return
    if part.kind != "replays":
        options = [*([trace] if part.needs_trace else []), "--json"]
        options += ["--quick"] if quick else []
        options += ["--write"] if write else []
        sections = part.sections if quick else (*part.sections, *part.long_sections)
        for only in sections or [""]:
            yield [*part.arguments, *options, *(["--only", only] if only else [])]
        return
    sources = [trace] if trace else ["agents"] if quick else ["agents", "multi-turn", "long-tail"]
    for source in sources:
        limit = ["--limit", "1500"] if quick else []
        yield [*part.arguments, source, "--policies", POLICIES, "--json", *limit]


def run(part: Part, command: Sequence[str], *, quick: bool) -> Outcome:
    """Carry it out; its exit status says only whether every goal was met."""
    begun_s = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    script = command if command[0] == "-m" else [str(HERE / command[0]), *command[1:]]
    try:
        ended = subprocess.run(
            [sys.executable, *script], env=environment, capture_output=True, text=True,
            timeout=QUICK_S if quick else FULL_S, check=False,
        )  # fmt: skip
        words, failure = ended.stderr, "" if ended.stdout.strip() else "no figures"
        found = None if failure else _read(part, ended.stdout)
    except subprocess.TimeoutExpired as error:
        found, failure, words = None, f"not over after {error.timeout:.0f} s", ""
    except ValueError as error:
        found, failure = None, f"unreadable: {error}"
    last_words = "\n".join([*words.splitlines()[-6:], failure]) if failure else ""
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in command)
    return Outcome(part, shown, time.monotonic() - begun_s, found, last_words)


def _read(part: Part, printed: str) -> Any:
    if part.kind == "replays":
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return json.loads(printed)
