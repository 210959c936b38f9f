"""The parts of `compare.py`: their commands, what they need, and what each command printed."""

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
ROOT = HERE.parent
INSTALL_S = 3600.0
QUICK_S, FULL_S = 900.0, 4 * 3600.0
"""Beyond these a command is ended: the first one may have to install its peer."""

SERVICE = ("cycle,client,httpx", "queries", "json,binary,alone", "ingest")
SERVICE_LONG = ("nats", "features", "fleet", "overload")
POLICIES = "predictive dynamo-1.6 dynamo-1.0 lmetric cache-aware round-robin"


class MissingError(Exception):
    """An environment is not there, and cannot be installed."""


class Environment(Struct, frozen=True):
    """A program that a part needs. `variable` names it, or `target` of the Makefile installs it."""

    variable: str
    program: str
    """Its path below the project's root, once it is installed."""
    target: str

    @property
    def remedy(self) -> str:
        return f"make {self.target}; or name another one with {self.variable}=…"

    def variables(self) -> dict[str, str]:
        """Return the variable that names it, installed if need be. Raises MissingError."""
        if named := os.environ.get(self.variable):
            if not Path(named).exists():
                raise MissingError(f"{self.variable}={named}: no such file")
            return {self.variable: named}
        path = ROOT / self.program
        if not path.exists():
            print(f"make {self.target} …", file=sys.stderr, flush=True)
            try:
                command = ["make", "--directory", f"{ROOT}", self.target]
                subprocess.run(command, stdout=subprocess.DEVNULL, timeout=INSTALL_S, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                raise MissingError(f"{self.program} is not installed: {error}") from error
        return {self.variable: str(path)}


VLLM = Environment("VLLM_PYTHON", ".vllm-venv/bin/python", ".vllm-venv/.installed")
ENVOY = Environment("ENVOY", ".gateway-venv/bin/envoy", ".gateway-venv/.installed")


class Part(Struct, frozen=True):
    """A script, how its figures are to be read, and what they stand beside."""

    title: str
    peer: str
    kind: Literal["rows", "faults", "replays"]
    arguments: Sequence[str]
    sections: Sequence[str] = ()
    """Run one by one, so that one that fails costs the others nothing."""
    long_sections: Sequence[str] = ()
    """The same, but not with `--quick`."""
    by_hand: Sequence[str] = ()
    """Sections that take hours each, and are not run here."""
    needs_trace: bool = False
    needs: Environment | None = None


class Outcome(Struct, frozen=True):
    """The figures that a command printed; `failure`: its last words, if it printed none."""

    part: Part
    command: str
    seconds: float
    found: Any = None
    failure: str = ""
    remedy: str = ""
    """The way to mend the failure, if it is known."""


class NotMade(Struct, frozen=True):
    """A table that a run did not make."""

    table: str
    why: str
    remedy: str


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
    "plane": Part(
        "The event plane",
        "plain clients of NATS, decoding alone, or the goal",
        "rows",
        ["events.py"],
        ("ingest", "visible", "late_join", "recovery", "zmq"),
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
        ("learning", "workloads", "routers"),
        ("physics", "hybrid", "agents", "rollouts", "users", "documents", "slo"),
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
    "tenants": Part(
        "A tenant beside one that asks for ten times as much, simulated",
        "half of the fleet alone",
        "rows",
        ["fairness.py"],
    ),
    "connectors": Part(
        "Evicted prompts in a real vLLM on the CPU",
        "vLLM's own connectors; LMCache, if LMCACHE_PYTHON names one",
        "rows",
        ["engine_cache.py"],
        ("layers,restore",),
        ("faults", "full"),
        needs=VLLM,
    ),
    "picker": Part(
        "The endpoint picker behind a real Envoy",
        "a picker with the same gRPC that decides nothing",
        "rows",
        ["epp.py"],
        ("rate", "added", "long", "texts", "events", "pickers"),
        needs=ENVOY,
    ),
    "handover": Part(
        "Prompts pushed to the worker that decodes, with the reference engine",
        "the same, read after they are computed",
        "rows",
        ["handover.py"],
    ),
    "placement": Part(
        "Conversations on three workers with the reference engine",
        "round-robin on the same fleet",
        "rows",
        ["placement.py"],
    ),
    "rates": Part(
        "Speed of engines without an agent, learned",
        "the goal: the truth is known",
        "rows",
        ["rates.py"],
        ("simulated", "captured"),
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


def not_run(name: str, part: Part, trace: str) -> Iterator[NotMade]:
    """Yield the tables of a part that no command of a run makes."""
    if part.needs_trace and not trace:
        yield NotMade(part.title, "it needs a trace", f"make compare TRACE=FILE, with {name}")
    for section in part.by_hand:
        command = f"python benchmarks/{part.arguments[0]} TRACE --only {section} --write"
        yield NotMade(f"{part.title}: {section}", "it takes hours", command)


def run(part: Part, command: Sequence[str], *, quick: bool) -> Outcome:
    """Carry it out; its exit status says only whether every goal was met."""
    begun_s = time.monotonic()
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in command)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    script = command if command[0] == "-m" else [str(HERE / command[0]), *command[1:]]
    try:
        environment |= part.needs.variables() if part.needs else {}
    except MissingError as error:
        took_s, remedy = time.monotonic() - begun_s, part.needs.remedy if part.needs else ""
        return Outcome(part, shown, took_s, failure=str(error), remedy=remedy)
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
    return Outcome(part, shown, time.monotonic() - begun_s, found, last_words)


def _read(part: Part, printed: str) -> Any:
    if part.kind == "replays":
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return json.loads(printed)
