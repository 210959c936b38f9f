"""The policy `predictive` beside all others, replayed on a trace in virtual time.

python benchmarks/scheduling.py TRACE [--quick] [--json] [--only …] [--seeds 5] [--jobs 2] [--write]

TRACE is a file in Mooncake's format. Every replay is of 16 workers of the 70 B preset, events and
reports 50 ms late, rates learned from a cold start. Figures are means over the seeds, which decide
every random choice and make the made-up workloads; a policy that is compared "as it comes or tuned"
is the best of a grid. `--journal FILE` goes on where a run with the same code was cut short.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from command_line import section_parser
from msgspec import json, to_builtins
from msgspec.structs import replace
from report import RESULTS, Benchmark, keep
from rows import as_json, as_table, machine
from scheduling_agents import (
    agents_cases,
    agents_rows,
    documents_cases,
    documents_rows,
    rollouts_cases,
    rollouts_rows,
    users_cases,
    users_rows,
)
from scheduling_hybrid import hybrid_cases, hybrid_rows
from scheduling_physics import QUICK, physics_cases, physics_rows
from scheduling_runs import append_to_journal, read_journal, run_all
from scheduling_sections import SECTIONS, SPEEDS, WORKLOAD_NAMES, Found, Plan, Section
from scheduling_slo import slo_cases, slo_rows

from router.simulator.physics import PHYSICS

NAME = "scheduling"
"""Of its results: rows in one file, replays in a file for each section."""

ALL = {
    **SECTIONS,
    "physics": Section(physics_cases, physics_rows),
    "hybrid": Section(hybrid_cases, hybrid_rows),
    "agents": Section(agents_cases, agents_rows),
    "rollouts": Section(rollouts_cases, rollouts_rows),
    "users": Section(users_cases, users_rows),
    "documents": Section(documents_cases, documents_rows),
    "slo": Section(slo_cases, slo_rows),
}
SPLITS = {"look": (1, 0), "release": (2, 1_000)}
"""The half of the trace, and the first seed: a change may look at one, a release at the other."""


def main() -> int:
    arguments = parser().parse_args()
    plan = planned(arguments)
    facts = benchmark(plan).facts()
    found = replayed(plan, arguments)
    rows = {name: list(ALL[name].rows(plan, found)) for name in arguments.only}
    if arguments.write:
        keep(NAME, facts, rows)
        for name in arguments.only:
            write(name, {case: found[case] for case in ALL[name].cases(plan, found)})
    every = [row for each in rows.values() for row in each]
    print(as_json(every) if arguments.json else f"{machine()}\n{as_table(every, 'other')}")
    return 0 if all(row.holds for row in every) else 1


def benchmark(plan: Plan) -> Benchmark:
    """Return the benchmark with this plan, in words."""
    requests = "all requests" if plan.requests is None else f"the first {plan.requests:,} requests"
    speeds = ", ".join(f"{speed:g}" for speed in plan.speeds)
    half = "second" if plan.half == 2 else "first"
    half = f"physics: the {half} half of the trace"
    scale = f"{requests}, {plan.seeds} seeds, speeds {speeds}; {half}"
    return Benchmark(NAME, "other", scale)


def parser() -> argparse.ArgumentParser:
    made = section_parser(__doc__, ALL)
    made.add_argument("trace", help="a file in Mooncake's format")
    made.add_argument("--seeds", type=int, default=5, help="of each replay that is compared")
    made.add_argument("--speeds", type=numbers, default=SPEEDS, help="of arrivals in the trace")
    made.add_argument("--requests", type=int, help="the first of a trace or workload; default: all")
    made.add_argument("--physics", type=names, default=(), help=f"some of {','.join(PHYSICS)}")
    made.add_argument("--workloads", type=words, default=WORKLOAD_NAMES, help="of physics")
    made.add_argument("--split", choices=SPLITS, default="look", help="of physics")
    made.add_argument("--jobs", type=int, default=2, help="processes")
    made.add_argument("--journal", type=Path, help="what is over, a line a replay")
    return made


def words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in words(text))


def names(text: str) -> tuple[str, ...]:
    chosen = words(text)
    if unknown := set(chosen) - set(PHYSICS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return chosen


def planned(arguments: argparse.Namespace) -> Plan:
    """What is replayed: with `--quick`, the fastest arrivals of a short trace."""
    half, first_seed = SPLITS[arguments.split]
    plan = Plan(
        arguments.trace,
        arguments.seeds,
        arguments.speeds,
        arguments.requests,
        arguments.physics,
        arguments.workloads,
        half,
        first_seed,
    )
    if not arguments.quick:
        return plan
    return replace(
        plan, seeds=1, speeds=(2.2,), requests=1_500, physics=QUICK, workloads=(), stride=12
    )


def replayed(plan: Plan, arguments: argparse.Namespace) -> Found:
    """Every case, from the journal or anew, and those that follow from them."""
    found = read_journal(arguments.journal) if arguments.journal else {}
    with ProcessPoolExecutor(arguments.jobs) as pool:  # of which each process reads a trace once
        while missing := {
            case: None
            for name in arguments.only
            for case in ALL[name].cases(plan, found)
            if case not in found
        }:
            for case, summary in run_all(missing, pool):
                found[case] = summary
                if arguments.journal:
                    append_to_journal(arguments.journal, case, summary)
    return found


def write(section: str, found: Found) -> None:
    """Write every replay of a section. Traces are named without their folders."""
    replays = [
        {**to_builtins(case), "source": Path(case.source).name, **to_builtins(summary)}
        for case, summary in found.items()
    ]
    file = RESULTS / f"{NAME}-{section}.json"
    file.write_bytes(json.format(json.encode(replays), indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
