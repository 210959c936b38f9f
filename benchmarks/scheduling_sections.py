"""What `scheduling.py` compares: which replays a section needs, the rows that follow from them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, stdev

from msgspec import Struct
from rows import Row
from scheduling_runs import Case

from router.simulator.summary import Summary

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

MEANS = ("ttft_mean_s", "e2e_mean_s")

Settings = tuple[tuple[str, float], ...]
WEIGHTS: Sequence[Settings] = [(("prefill_load_scale", w),) for w in (1.0, 2.0, 4.0, 8.0, 16.0)]
GRID: Mapping[str, Sequence[Settings]] = {
    "dynamo-1.0": WEIGHTS,
    "dynamo-1.6": [
        (("prefill_load_scale", scale), ("decode_active_request_weight", weight))
        for scale in (1.0, 8.0, 16.0)
        for weight in (0.0, 8.0)
    ],
    "lmetric": [()],
    "cache-aware": [
        (("balance_abs", more), ("balance_rel", times), ("cache_threshold", threshold))
        for more, times in ((64.0, 1.5), (8.0, 1.1), (2.0, 1.1))
        for threshold in (0.1, 0.3)
    ],
    "least-loaded": [()],
    "power-of-two": [()],
    "round-robin": [()],
    "random": [()],
}
WORKLOAD_NAMES = ("shared-prompts", "multi-turn", "agents", "long-tail")
WORKLOAD_SEEDS = 3
MORE_ROUTERS = (2, 4, 8)

STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of a 95 % confidence interval over 2 to 10 seeds."""

Found = Mapping[Case, Summary]


class Plan(Struct, frozen=True):
    """How much is replayed. The rest is of `physics` alone: fleets, by default all; made-up
    workloads; which half of the trace; the first of the seeds; each how many-th candidate.
    """

    trace: str
    seeds: int
    speeds: tuple[float, ...]
    requests: int | None = None
    physics: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    half: int = 1
    first_seed: int = 0
    stride: int = 1

    def cases(self, policy: str, **fields: object) -> list[Case]:
        """One for each seed."""
        named = {"source": self.trace, "requests": self.requests, "policy": policy, **fields}
        return [Case(seed=seed, **named) for seed in range(self.seeds)]  # type: ignore[arg-type]


class Section(Struct, frozen=True):
    """Which cases a section needs, and the rows that follow from them.

    The cases may depend on those that are found: as long as there are others, they are replayed.
    """

    cases: Callable[[Plan, Found], Iterable[Case]]
    rows: Callable[[Plan, Found], Iterable[Row]]


def fixed(
    cases: Callable[[Plan], Iterable[Case]], rows: Callable[[Plan, Found], Iterable[Row]]
) -> Section:
    """A section whose cases are known beforehand."""
    return Section(lambda plan, _: cases(plan), rows)


def mean(found: Found, cases: Sequence[Case], field: str) -> float:
    return fmean(getattr(found[case], field) for case in cases)


def best_of(found: Found, tried: Iterable[Sequence[Case]], field: str) -> Sequence[Case]:
    """The settings that are best on average."""
    return min(tried, key=lambda cases: mean(found, cases, field))


def row(
    name: str, found: Found, ours: Sequence[Case], other: Sequence[Case], field: str, goal: float
) -> Row:
    lower = field not in ("hit_rate", "goodput")
    unit, scale = ("ms", 1e3) if field.endswith("_s") else ("%", 1e2)
    found_ours, found_other = (scale * mean(found, cases, field) for cases in (ours, other))
    error = _ratio_error(found, ours, other, field) if len(ours) == len(other) else 0.0
    return Row(name, found_ours, found_other, unit, goal, lower, error)


def _ratio_error(found: Found, ours: Sequence[Case], other: Sequence[Case], field: str) -> float:
    """Half the width of the 95 % confidence interval of the ratio, seed by seed."""
    pairs = zip(ours, other, strict=True)
    ratios = [getattr(found[one], field) / getattr(found[two], field) for one, two in pairs]
    if not 2 <= len(ratios) <= 1 + len(STUDENT_T):
        return 0.0
    return float(STUDENT_T[len(ratios) - 2] * stdev(ratios) / len(ratios) ** 0.5)


# ── the table ────────────────────────────────────────────────────────────────────────────────────


def table_cases(plan: Plan) -> Iterator[Case]:
    for speed in plan.speeds:
        yield from plan.cases("dynamo-1.0", settings=WEIGHTS[0], arrival_speed=speed)
        yield from plan.cases(OURS, arrival_speed=speed)


def table_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for speed in plan.speeds:
        ours = plan.cases(OURS, arrival_speed=speed)
        peer = plan.cases("dynamo-1.0", settings=WEIGHTS[0], arrival_speed=speed)
        for field, goals in GOALS.items():
            yield row(f"{speed:g} {field}", found, ours, peer, field, goals[SPEEDS.index(speed)])


# ── the best weight ──────────────────────────────────────────────────────────────────────────────


def weights_cases(plan: Plan) -> Iterator[Case]:
    for speed in plan.speeds:
        for settings in WEIGHTS:
            yield from plan.cases("dynamo-1.0", settings=settings, arrival_speed=speed)
        yield from plan.cases(OURS, arrival_speed=speed)


def weights_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for speed in plan.speeds:
        ours = plan.cases(OURS, arrival_speed=speed)
        tried = [
            plan.cases("dynamo-1.0", settings=settings, arrival_speed=speed) for settings in WEIGHTS
        ]
        for field in MEANS:
            best = best_of(found, tried, field)
            yield row(f"{speed:g} {best[0].told} {field}", found, ours, best, field, 1.0)


# ── every other policy ───────────────────────────────────────────────────────────────────────────


def rivals(plan: Plan, **fields: object) -> Iterator[list[Case]]:
    """Every other policy with every setting of its grid, one seed of each."""
    for policy, grid in GRID.items():
        for settings in grid:
            yield plan.cases(policy, settings=settings, **fields)[:1]


def policies_cases(plan: Plan) -> Iterator[Case]:
    for speed in plan.speeds:
        for cases in rivals(plan, arrival_speed=speed):
            yield from cases
        yield from plan.cases(OURS, arrival_speed=speed)


def policies_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for speed in plan.speeds:
        ours, every = plan.cases(OURS, arrival_speed=speed), list(rivals(plan, arrival_speed=speed))
        for policy in GRID:
            tried = [cases for cases in every if cases[0].policy == policy]
            for field in MEANS:
                best = best_of(found, tried, field)
                yield row(f"{speed:g} {best[0].label} {field}", found, ours, best, field, 1.0)


# ── what learning is worth ───────────────────────────────────────────────────────────────────────

FLEETS: Mapping[str, Mapping[str, object]] = {
    "half slow": {"slow_workers": 8},
    "one slows": {"slowing": 900.0},
}


def learning_cases(plan: Plan) -> Iterator[Case]:
    for fleet in FLEETS.values():
        yield from plan.cases("dynamo-1.0", settings=WEIGHTS[0], **fleet)
        yield from plan.cases(OURS, **fleet)
        for cases in rivals(plan, **fleet):
            yield from cases


def learning_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for name, fleet in FLEETS.items():
        ours, tried = plan.cases(OURS, **fleet), list(rivals(plan, **fleet))
        untuned = plan.cases("dynamo-1.0", settings=WEIGHTS[0], **fleet)
        for field in (*MEANS, "ttft_p99_s"):
            yield row(f"{name}, dynamo-1.0 {field}", found, ours, untuned, field, 1.0)
            best = best_of(found, tried, field)
            yield row(f"{name}, best: {best[0].label} {field}", found, ours, best, field, 1.0)


# ── other workloads ──────────────────────────────────────────────────────────────────────────────


def workloads_cases(plan: Plan) -> Iterator[Case]:
    for workload in WORKLOAD_NAMES:
        for policy, grid in {**GRID, OURS: [()]}.items():
            for settings in grid:
                made = plan.cases(policy, source=workload, settings=settings)
                yield from made[:WORKLOAD_SEEDS]


def workloads_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for workload in WORKLOAD_NAMES:
        ours = plan.cases(OURS, source=workload)[:WORKLOAD_SEEDS]
        tried = [
            plan.cases(policy, source=workload, settings=settings)[:WORKLOAD_SEEDS]
            for policy, grid in GRID.items()
            for settings in grid
        ]
        for field in MEANS:
            best = best_of(found, tried, field)
            yield row(f"{workload} {best[0].label} {field}", found, ours, best, field, 1.03)


# ── several routers ──────────────────────────────────────────────────────────────────────────────


def arrivals(plan: Plan) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Traces whose moments are rounded bring bursts; spread, they bring what they were made of."""
    for speed in plan.speeds:
        yield f"{speed:g} bursts", {"arrival_speed": speed}
        yield f"{speed:g} spread", {"arrival_speed": speed, "spread": True}


def routers_cases(plan: Plan) -> Iterator[Case]:
    for _, fields in arrivals(plan):
        for routers in (1, *MORE_ROUTERS):
            yield from plan.cases(OURS, routers=routers, **fields)


def routers_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for name, fields in arrivals(plan):
        one = plan.cases(OURS, **fields)
        for routers in MORE_ROUTERS:
            several = plan.cases(OURS, routers=routers, **fields)
            for field in ("ttft_mean_s", "load_spread"):
                yield row(f"{name}, {routers} routers {field}", found, several, one, field, 1.1)


SECTIONS = {
    "table": fixed(table_cases, table_rows),
    "weights": fixed(weights_cases, weights_rows),
    "learning": fixed(learning_cases, learning_rows),
    "workloads": fixed(workloads_cases, workloads_rows),
    "routers": fixed(routers_cases, routers_rows),
    "policies": fixed(policies_cases, policies_rows),
}
