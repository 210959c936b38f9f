"""The section `hybrid` of `scheduling.py`: fleets of hybrid models, which resume at checkpoints.

Our router knows every class of layers. Rivals' routers know full attention only: theirs drop the
other events, and are tuned so. Beside them is our own with the same knowledge as theirs.
"""

from collections.abc import Iterator

from msgspec.structs import replace
from rows import Row
from scheduling_physics import UNTUNED, Cell, Rival, fleet_cells, replayed_rivals, score, searched
from scheduling_runs import Case
from scheduling_sections import MEANS, OURS, Found, Plan, mean, row

from router.simulator.physics import PHYSICS

FLEETS = tuple(name for name, physics in PHYSICS.items() if physics.layers)
GROUPS, PROMPTS = 24, 16
ROLLOUT_FIGURES = ("makespan_s", "ttft_mean_s", "prefixes_computed")


def hybrid_cells(plan: Plan) -> Iterator[Cell]:
    """Every fleet with the traffic of `physics`, and with groups of equal prompts side by side."""
    fleets = [name for name in plan.physics if name in FLEETS] or FLEETS
    yield from fleet_cells(plan, fleets)
    for physics in fleets:
        options = (("prompts", PROMPTS), ("at_once", PHYSICS[physics].workers))
        fields = {"source": "rollouts", "options": options}
        groups = min(GROUPS, (plan.requests or 1_000_000) // PROMPTS)
        seeds = (plan.first_seed, plan.seeds)
        name = f"{PHYSICS[physics].workers} × {PROMPTS} rollouts"
        yield Cell(physics, name, fields, groups, *seeds, ROLLOUT_FIGURES, (3, 1), plan.stride)


def hybrid_cases(plan: Plan, found: Found) -> Iterator[Case]:
    for cell in hybrid_cells(plan):
        yield from _knowing_less(cell)
        yield from searched(cell, found, UNTUNED)


def hybrid_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for cell in hybrid_cells(plan):
        for field in MEANS if cell.figures == MEANS else ROLLOUT_FIGURES:
            yield _row(cell, found, field)


def _knowing_less(cell: Cell) -> list[Case]:
    """Our replays with full attention only."""
    return [replace(case, full_only=True) for case in cell.cases(Rival(OURS))]


def _row(cell: Cell, found: Found, field: str) -> Row:
    """The row of a figure: beside the best rival, with the untuned ones as a note."""
    ours = cell.cases(Rival(OURS))
    best = min(
        replayed_rivals(cell, found, UNTUNED), key=lambda each: score(cell, found, each, field)
    )
    notes = [best.label]
    others = [(each.policy, cell.cases(each)) for each in UNTUNED]
    for name, cases in (*others, ("ours with full attention only", _knowing_less(cell))):
        notes.append(f"{name} {mean(found, ours, field) / mean(found, cases, field):.2f}")
    made = row(f"{cell.name} {field}", found, ours, cell.cases(best), field, 1.0)
    if field == "prefixes_computed":
        made = replace(made, ours=made.ours / 1e2, peer=made.peer / 1e2, unit="times")
    return replace(made, note=", ".join(notes))
