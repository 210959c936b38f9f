"""The section `physics` of `scheduling.py`: all fleets that no policy was made for, all traffic.

A rival is tuned for each fleet and traffic by successive halving, on one seed and the first quarter
of the requests; then all that are compared are replayed with the same seeds. The best settings for
each figure are its rival: two searches, two rivals.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from statistics import median

from msgspec import Struct
from msgspec.structs import replace
from rows import Row
from scheduling_runs import Case, number_of_requests
from scheduling_sections import MEANS, OURS, Found, Plan, Settings, mean, row

from router.simulator.physics import PHYSICS

GOAL, MEDIAN_GOAL = 1.02, 0.95
QUICK = ("plain", "mocker-4", "everything")
"""Of `--quick`, with the trace alone."""

_SCALES = [2.0**power for power in range(-2, 11)]
_REQUESTS = [0.0, *(4.0**power for power in range(-1, 6))]
_KEPT = 4
"""One in as many candidates goes on to the next rung."""


class Rival(Struct, frozen=True):
    """A policy with settings."""

    policy: str
    settings: Settings = ()

    @property
    def label(self) -> str:
        """The policy and the values of its settings."""
        return " ".join([self.policy, *(f"{value:g}" for _, value in self.settings)])

    @property
    def is_on_edge(self) -> bool:
        """True if a larger or smaller weight may be better, and was not tried."""
        tried = {"prefill_load_scale": _SCALES, "decode_active_request_weight": _REQUESTS}
        return any(
            value in (tried[name][-1], tried[name][0] or -1.0)
            for name, value in self.settings
            if name in tried
        )


UNTUNED = (Rival("dynamo-1.0"), Rival("dynamo-1.6"))
CANDIDATES: Sequence[Rival] = [
    *(Rival("dynamo-1.0", (("prefill_load_scale", scale),)) for scale in _SCALES),
    *(
        Rival(
            "dynamo-1.6",
            (("prefill_load_scale", scale), ("decode_active_request_weight", weight)),
        )
        for scale, weight in product(_SCALES, _REQUESTS)
    ),
    *(
        Rival(
            "cache-aware",
            (("balance_abs", more), ("balance_rel", times), ("cache_threshold", threshold)),
        )
        for more, times in ((128.0, 2.0), (64.0, 1.5), (16.0, 1.5), (8.0, 1.1), (2.0, 1.1))
        for threshold in (0.1, 0.3, 0.5)
    ),
    *(
        Rival("llm-d", (("affinity", affinity), ("penalty_tokens", penalty)))
        for affinity, penalty in product((0.2, 0.5, 0.8), (1e3, 4e3, 16e3, 64e3, 256e3, 1e6))
    ),
    Rival("lmetric"),
    Rival("least-loaded"),
]


class Cell(Struct, frozen=True):
    """A fleet and its traffic. `fields`: of its cases. `requests`: of a whole replay. `figures`:
    those that are compared. `rungs`: the parts of the requests that candidates are tried with, of
    which there is one in `stride`.
    """

    physics: str
    traffic: str
    fields: Mapping[str, object]
    requests: int
    first_seed: int
    seeds: int
    figures: tuple[str, ...] = MEANS
    rungs: tuple[int, ...] = (16, 8, 4)
    stride: int = 1

    @property
    def name(self) -> str:
        """The name of its rows."""
        return f"{self.physics}, {self.traffic}"

    def case(self, rival: Rival, requests: int, seed: int) -> Case:
        """Return one replay. Of hybrid models, rivals' routers know full attention only."""
        named = {"physics": self.physics, "requests": requests, "seed": seed, **self.fields}
        if PHYSICS[self.physics].layers and rival.policy != OURS:
            named["full_only"] = True
        return Case(policy=rival.policy, settings=rival.settings, **named)  # type: ignore[arg-type]

    def cases(self, rival: Rival) -> list[Case]:
        """Return the replays that are compared, one for each seed."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [self.case(rival, self.requests, seed) for seed in seeds]

    def trials(self, rivals: Iterable[Rival], part: int) -> list[Case]:
        """Return the replays of candidates with one part in `part` of the requests."""
        requests = max(self.requests // part, 1)
        return [self.case(rival, requests, self.first_seed) for rival in rivals]


def cells(plan: Plan) -> Iterator[Cell]:
    """Every fleet with every traffic of the plan; by default, all but those of hybrid models."""
    named = [name for name, physics in PHYSICS.items() if not physics.layers]
    yield from fleet_cells(plan, plan.physics or named)


def fleet_cells(plan: Plan, fleets: Iterable[str]) -> Iterator[Cell]:
    """These fleets with every traffic of the plan."""
    for physics in fleets:
        for traffic, fields in _traffic(plan):
            whole = number_of_requests(Case(policy=OURS, **fields))  # type: ignore[arg-type]
            requests = min(plan.requests or whole, whole)
            seeds = (plan.first_seed, plan.seeds)
            yield Cell(physics, traffic, fields, requests, *seeds, stride=plan.stride)


def _traffic(plan: Plan) -> Iterator[tuple[str, Mapping[str, object]]]:
    for speed in plan.speeds:
        yield (
            f"trace at {speed:g}",
            {"source": plan.trace, "half": plan.half, "arrival_speed": speed},
        )
    for workload in plan.workloads:
        yield workload, {"source": workload}


def physics_cases(plan: Plan, found: Found) -> Iterator[Case]:
    """Every case whose settings are known by now: more of them are, as soon as these are found."""
    for cell in cells(plan):
        yield from searched(cell, found, UNTUNED)


def searched(cell: Cell, found: Found, untuned: Sequence[Rival]) -> Iterator[Case]:
    """The cases of a cell: ours, the untuned rivals, and those that are tried or were chosen."""
    for rival in (Rival(OURS), *untuned):
        yield from cell.cases(rival)
    rivals: Sequence[Rival] = CANDIDATES[:: cell.stride]
    for part in cell.rungs:
        trials = cell.trials(rivals, part)
        yield from trials
        if any(trial not in found for trial in trials):
            return
        rivals = _survivors(cell, found, rivals, trials, 1 if part == cell.rungs[-1] else 0)
    for rival in rivals:
        yield from cell.cases(rival)


def _survivors(
    cell: Cell, found: Found, rivals: Sequence[Rival], trials: Sequence[Case], each: int
) -> list[Rival]:
    """Return the best for any figure: `each`, or by default one in `_KEPT` by all figures."""
    each = each or max(len(rivals) // (_KEPT * len(cell.figures)), 1)
    kept: dict[Rival, None] = {}
    for field in cell.figures:
        ordered = sorted(
            zip(rivals, trials, strict=True), key=lambda pair: mean(found, [pair[1]], field)
        )
        kept.update((rival, None) for rival, _ in ordered[:each])
    return list(kept)


def physics_rows(plan: Plan, found: Found) -> Iterator[Row]:
    """A row for each fleet, traffic and figure, and the median of each figure."""
    ratios: dict[str, list[float]] = {field: [] for field in MEANS}
    for cell in cells(plan):
        for field in MEANS:
            made = _row(cell, found, field)
            ratios[field].append(made.ratio)
            yield made
    for field, every in ratios.items():
        lost = sum(ratio > 1 for ratio in every)
        note = f"behind in {lost} of {len(every)}, by up to {max(every):.3f}"
        yield Row(f"median {field}", median(every), 1.0, "ratio", MEDIAN_GOAL, True, note=note)


def _row(cell: Cell, found: Found, field: str) -> Row:
    """Return the row of a figure: beside the best tuned rival, with the untuned ones as a note."""
    ours, rival = cell.cases(Rival(OURS)), _tuned(cell, found, field)
    notes = [rival.label + " on the edge" * rival.is_on_edge]
    for untuned in UNTUNED:
        ratio = mean(found, ours, field) / mean(found, cell.cases(untuned), field)
        notes.append(f"{untuned.policy} {ratio:.2f}")
    unserved = sum(found[case].unserved for case in (*ours, *cell.cases(rival)))
    notes += [f"{unserved} not served"] if unserved else []
    made = row(f"{cell.name} {field}", found, ours, cell.cases(rival), field, GOAL)
    return replace(made, note=", ".join(notes))


def replayed_rivals(cell: Cell, found: Found, untuned: Sequence[Rival]) -> list[Rival]:
    """Return the untuned rivals, and those that were chosen: replayed with every seed."""
    chosen = (each for each in CANDIDATES if all(case in found for case in cell.cases(each)))
    return [*untuned, *chosen]


def score(cell: Cell, found: Found, rival: Rival, field: str) -> float:
    """Return the mean of a figure over the seeds."""
    return mean(found, cell.cases(rival), field)


def _tuned(cell: Cell, found: Found, field: str) -> Rival:
    """Return the best of the rivals that were replayed with all requests."""
    rivals = replayed_rivals(cell, found, UNTUNED)
    return min(rivals, key=lambda each: score(cell, found, each, field))
