"""The policy `predictive` beside all others, replayed on a trace in virtual time.

python benchmarks/scheduling.py TRACE [--quick] [--json] [--only …] [--seeds 5] [--jobs 2] [--write]

TRACE is a file in Mooncake's format. Every replay is of 16 workers of the 70 B preset, events and
reports 50 ms late, rates learned from a cold start. Figures are means over the seeds; a policy that
is compared "as it comes or tuned" is the best of a grid.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from command_line import section_parser
from msgspec import Struct, to_builtins
from rows import Row, as_json, as_table, machine
from scheduling_runs import Case, run_all

from router.simulator.summary import Summary

RESULTS = Path(__file__).with_name("results")
SPEEDS = (1.0, 1.6, 2.2)
OURS = "predictive"
GOALS = {
    "ttft_median_s": (0.66, 0.58, 0.50),
    "ttft_mean_s": (0.84, 0.76, 0.66),
    "ttft_p99_s": (1.00, 1.00, 0.95),
    "e2e_mean_s": (0.92, 0.87, 0.78),
    "tpot_p99_s": (0.50, 0.60, 0.95),
    "hit_rate": (1.25, 1.30, 1.35),
}
"""Of `predictive` to `dynamo-1.0` with weight 1, at each speed: at most, of hits at least."""

GRID: Mapping[str, Sequence[tuple[tuple[str, float], ...]]] = {
    "dynamo-1.0": [(("prefill_load_scale", weight),) for weight in (1.0, 2.0, 4.0, 8.0, 16.0)],
    "dynamo-1.6": [
        (("prefill_load_scale", scale), ("decode_active_request_weight", weight))
        for scale in (1.0, 8.0, 16.0)
        for weight in (0.0, 8.0)
    ],
    "lmetric": [()],
    "cache-aware": [()],
    "least-loaded": [()],
    "power-of-two": [()],
    "round-robin": [()],
    "random": [()],
}
WORKLOAD_NAMES = ("shared-prompts", "multi-turn", "agents", "long-tail")
MORE_ROUTERS = (2, 4, 8)
Found = Mapping[Case, Summary]


class Section(Struct, frozen=True):
    """Which cases a section needs, and the rows that follow from them."""

    cases: Callable[["Plan"], Iterable[Case]]
    rows: Callable[["Plan", Found], Iterable[Row]]


class Plan(Struct, frozen=True):
    """How much is replayed."""

    trace: str
    seeds: int
    speeds: tuple[float, ...]
    requests: int | None

    def cases(self, policy: str, **fields: object) -> list[Case]:
        """One for each seed."""
        named = {"source": self.trace, "requests": self.requests, "policy": policy, **fields}
        return [Case(seed=seed, **named) for seed in range(self.seeds)]  # type: ignore[arg-type]


def mean(found: Found, cases: Sequence[Case], field: str) -> float:
    return sum(getattr(found[case], field) for case in cases) / len(cases)


def row(
    name: str, found: Found, ours: Sequence[Case], other: Sequence[Case], field: str, goal: float
) -> Row:
    lower = field != "hit_rate"
    unit, scale = ("ms", 1e3) if field.endswith("_s") else ("%", 1e2)
    found_ours, found_other = (scale * mean(found, cases, field) for cases in (ours, other))
    return Row(name, found_ours, found_other, unit, goal, lower)


# ── the table ────────────────────────────────────────────────────────────────────────────────────


def table_cases(plan: Plan) -> Iterable[Case]:
    for speed in plan.speeds:
        yield from plan.cases(OURS, arrival_speed=speed)
        yield from plan.cases("dynamo-1.0", arrival_speed=speed)


def table_rows(plan: Plan, found: Found) -> Iterable[Row]:
    for speed in plan.speeds:
        ours = plan.cases(OURS, arrival_speed=speed)
        peer = plan.cases("dynamo-1.0", arrival_speed=speed)
        for field, goals in GOALS.items():
            yield row(f"{speed:g} {field}", found, ours, peer, field, goals[SPEEDS.index(speed)])


# ── every other policy ───────────────────────────────────────────────────────────────────────────


def grid_cases(plan: Plan) -> Iterable[Case]:
    for speed in plan.speeds:
        yield from plan.cases(OURS, arrival_speed=speed)
        for policy, grid in GRID.items():
            for settings in grid:
                yield from plan.cases(policy, settings=settings, arrival_speed=speed)[:1]


def grid_rows(plan: Plan, found: Found) -> Iterable[Row]:
    for speed in plan.speeds:
        ours = plan.cases(OURS, arrival_speed=speed)
        for policy, grid in GRID.items():
            for field in ("ttft_mean_s", "e2e_mean_s"):
                tried = [
                    plan.cases(policy, settings=settings, arrival_speed=speed)[:1]
                    for settings in grid
                ]
                best = min(tried, key=lambda cases: mean(found, cases, field))
                yield row(f"{speed:g} {best[0].label} {field}", found, ours, best, field, 1.0)


# ── what learning is worth ───────────────────────────────────────────────────────────────────────

FLEETS: Mapping[str, Mapping[str, object]] = {
    "half slow": {"slow_workers": 8},
    "one slows": {"slowing": 900.0},
}


def learning_cases(plan: Plan) -> Iterable[Case]:
    for fleet in FLEETS.values():
        yield from plan.cases("dynamo-1.0", **fleet)
        for rates in ("rank", "shared", "scrambled"):
            yield from plan.cases(OURS, rates=rates, **fleet)


def learning_rows(plan: Plan, found: Found) -> Iterable[Row]:
    for name, fleet in FLEETS.items():
        ours = plan.cases(OURS, **fleet)
        for rates in ("shared", "scrambled"):
            other = plan.cases(OURS, rates=rates, **fleet)
            for field in ("ttft_mean_s", "ttft_p99_s"):
                yield row(f"{name}, {rates} {field}", found, ours, other, field, 1.0)
        dynamo = plan.cases("dynamo-1.0", **fleet)
        yield row(f"{name}, dynamo-1.0 ttft_mean_s", found, ours, dynamo, "ttft_mean_s", 1.0)


# ── other workloads ──────────────────────────────────────────────────────────────────────────────


def workload_cases(plan: Plan) -> Iterable[Case]:
    for workload in WORKLOAD_NAMES:
        for policy, grid in {OURS: [()], **GRID}.items():
            for settings in grid:
                yield from plan.cases(policy, source=workload, settings=settings)[:3]


def workload_rows(plan: Plan, found: Found) -> Iterable[Row]:
    for workload in WORKLOAD_NAMES:
        ours = plan.cases(OURS, source=workload)[:3]
        tried = [
            plan.cases(policy, source=workload, settings=settings)[:3]
            for policy, grid in GRID.items()
            for settings in grid
        ]
        for field in ("ttft_mean_s", "e2e_mean_s"):
            best = min(tried, key=lambda cases: mean(found, cases, field))
            yield row(f"{workload} {best[0].label} {field}", found, ours, best, field, 1.03)


# ── several routers ──────────────────────────────────────────────────────────────────────────────


def arrivals(plan: Plan) -> Iterable[tuple[str, Mapping[str, object]]]:
    """Traces whose moments are rounded bring bursts; spread, they bring what they were made of."""
    for speed in plan.speeds:
        yield f"{speed:g} bursts", {"arrival_speed": speed}
        yield f"{speed:g} spread", {"arrival_speed": speed, "spread": True}


def router_cases(plan: Plan) -> Iterable[Case]:
    for _, fields in arrivals(plan):
        for routers in (1, *MORE_ROUTERS):
            yield from plan.cases(OURS, routers=routers, **fields)


def router_rows(plan: Plan, found: Found) -> Iterable[Row]:
    for name, fields in arrivals(plan):
        one = plan.cases(OURS, **fields)
        for routers in MORE_ROUTERS:
            several = plan.cases(OURS, routers=routers, **fields)
            for field in ("ttft_mean_s", "load_spread"):
                yield row(f"{name}, {routers} routers {field}", found, several, one, field, 1.1)


SECTIONS = {
    "table": Section(table_cases, table_rows),
    "learning": Section(learning_cases, learning_rows),
    "workloads": Section(workload_cases, workload_rows),
    "routers": Section(router_cases, router_rows),
    "policies": Section(grid_cases, grid_rows),
}


def main() -> int:
    arguments = parser().parse_args()
    plan = Plan(arguments.trace, arguments.seeds, SPEEDS, None)
    if arguments.quick:
        plan = Plan(arguments.trace, 1, (2.2,), 1_500)
    sections = [SECTIONS[name] for name in arguments.only]
    found = run_all((case for each in sections for case in each.cases(plan)), arguments.jobs)
    rows = [row for each in sections for row in each.rows(plan, found)]
    if arguments.write:
        write(arguments.only, rows, found)
    print(as_json(rows) if arguments.json else f"{machine()}\n{as_table(rows, 'other')}")
    return 0 if all(each.holds for each in rows) else 1


def parser() -> argparse.ArgumentParser:
    made = section_parser(__doc__, SECTIONS)
    made.add_argument("trace", help="a file in Mooncake's format")
    made.add_argument("--seeds", type=int, default=5, help="of each replay that is compared")
    made.add_argument("--jobs", type=int, default=2, help="processes")
    made.add_argument("--write", action="store_true", help=f"into {RESULTS.name}/ as well")
    return made


def write(names: Sequence[str], rows: Sequence[Row], found: Found) -> None:
    """Rows for people, and every replay for programs. Traces are named without their folders."""
    replays = [
        {**to_builtins(case), "source": Path(case.source).name, **to_builtins(summary)}
        for case, summary in found.items()
    ]
    file = RESULTS / f"scheduling-{'-'.join(names)}"
    file.with_suffix(".json").write_text(json.dumps(replays, indent=1) + "\n")
    file.with_suffix(".txt").write_text(f"{machine()}\n{as_table(rows, 'other')}\n")


if __name__ == "__main__":
    sys.exit(main())
