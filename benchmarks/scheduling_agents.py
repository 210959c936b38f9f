"""The sections `agents`, `rollouts`, `users` and `documents` of `scheduling.py`: kinds of traffic.

All but `documents` are closed loops.

Engines admit prompts as vLLM does, so that equal ones at once are computed once by each engine that
gets them.

The load of agents is a fraction of the rate at which sessions end while far too many are
there, with the policy `lmetric`, which no setting spoils: a property of the fleet and the sessions,
found by one replay.

Groups of rollouts come one after another, or as many side by side as there are workers. A group
alone is sooner done if every worker computes its prompt, and decodes a part of it; side by side
they share the fleet, and each prompt should be computed once. Rivals are tuned as for `physics`.

Users are two a worker, on small fleets, as in a first trial of a router.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean

from msgspec.structs import replace
from rows import Row
from scheduling_physics import Cell, Rival, replayed_rivals, score, searched
from scheduling_runs import Case
from scheduling_sections import OURS, Found, Plan, row

from router.simulator.workloads.chat_users import ChatUsers

LOADS = (0.7, 0.95)
AGENT_WORKERS, SESSIONS = 8, 160
AGENT_FIGURES = ("ttft_mean_s", "session_mean_s", "ttft_p99_s")

GROUPS, GROUP_SIZES, GROUP_WORKERS = 24, (8, 16, 64), (4, 8)
ROLLOUT_FIGURES = ("makespan_s", "session_mean_s", "ttft_mean_s")
MAKESPAN_GOAL, COMPUTED_GOAL = 0.8, 1.3
COMPUTED = "prefixes_computed"

USER_WORKERS, USERS_A_WORKER, CONVERSATIONS_A_WORKER = (2, 3, 8), 2, 15
FIGURES = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s")
ROUND_ROBIN = Rival("round-robin")
DOCUMENT_WORKERS, DOCUMENT_REQUESTS_A_WORKER, DOCUMENT_REQUESTS_PER_S = (2, 4, 8, 16), 200, 2.2
AHEAD_GOAL = 0.8
"""Of mean TTFT beside round-robin."""

SGLANGS = (("balance_abs", 64.0), ("balance_rel", 1.5), ("cache_threshold", 0.3))
UNTUNED = (
    Rival("dynamo-1.0"),
    Rival("dynamo-1.6"),
    Rival("lmetric"),
    Rival("cache-aware", SGLANGS),
)
_PHYSICS = "deferring"
_REQUESTS_A_SESSION = 35
_OVERLOAD = 10.0
"""The factor by which sessions begin sooner while the throughput of a saturated fleet is taken."""


# ── agents ───────────────────────────────────────────────────────────────────────────────────────


def agents_cases(plan: Plan, found: Found) -> Iterator[Case]:
    saturated = _saturated(plan)
    yield saturated
    if saturated in found:
        for cell in agent_cells(plan, found):
            yield from searched(cell, found, UNTUNED)


def _saturated(plan: Plan) -> Case:
    """The replay of a fleet with far too many sessions."""
    return Case(
        source="agentic-code",
        policy="lmetric",
        requests=12 * AGENT_WORKERS,
        workers=AGENT_WORKERS,
        physics=_PHYSICS,
        arrival_speed=_OVERLOAD,
        seed=plan.first_seed,
    )


def agent_cells(plan: Plan, found: Found) -> Iterator[Cell]:
    """One for each load. A workload's sessions begin at one in ten seconds, at speed 1."""
    summary = found[_saturated(plan)]
    sessions_per_s = summary.requests_per_s * summary.sessions / summary.served
    for load in LOADS:
        fields = {
            "source": "agentic-code",
            "workers": AGENT_WORKERS,
            "arrival_speed": load * sessions_per_s / 0.1,
        }
        sessions = min(
            SESSIONS, (plan.requests or SESSIONS * _REQUESTS_A_SESSION) // _REQUESTS_A_SESSION
        )
        seeds = (plan.first_seed, plan.seeds)
        name = f"agents at {load:.0%}"
        yield Cell(_PHYSICS, name, fields, sessions, *seeds, AGENT_FIGURES, (4, 2, 1), plan.stride)


def agents_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for cell in agent_cells(plan, found):
        for field in AGENT_FIGURES:
            yield _beside_best(cell, found, field)
        yield _computed(cell, found)


# ── rollouts ─────────────────────────────────────────────────────────────────────────────────────


def rollouts_cases(plan: Plan, found: Found) -> Iterator[Case]:
    for cell in (*rollout_cells(plan, alone=True), *rollout_cells(plan, alone=False)):
        yield from searched(cell, found, UNTUNED)


def rollout_cells(plan: Plan, *, alone: bool) -> Iterator[Cell]:
    """One for each number of workers and of prompts; a group after another, or one a worker."""
    for workers in GROUP_WORKERS:
        for prompts in GROUP_SIZES:
            at_once = 1 if alone else workers
            options = (("prompts", prompts), ("at_once", at_once))
            fields = {"source": "rollouts", "options": options, "workers": workers}
            groups = min(GROUPS, (plan.requests or 1_000_000) // prompts)
            name = f"{workers} workers, {at_once} × {prompts} prompts"
            seeds = (plan.first_seed, plan.seeds)
            yield Cell(_PHYSICS, name, fields, groups, *seeds, ROLLOUT_FIGURES, (3, 1), plan.stride)


def rollouts_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for alone in (True, False):
        for cell in rollout_cells(plan, alone=alone):
            for field in ROLLOUT_FIGURES:
                yield _beside_best(cell, found, field)
            yield _computed(cell, found)
    side_by_side = list(rollout_cells(plan, alone=False))
    yield _mean_makespan(side_by_side, found)
    computed = fmean(score(cell, found, Rival(OURS), COMPUTED) for cell in side_by_side)
    yield Row("mean side by side: prompts computed", computed, 1.0, "times", COMPUTED_GOAL, True)


def _mean_makespan(side_by_side: Sequence[Cell], found: Found) -> Row:
    """The row of the mean ratio beside `dynamo-1.6` with its best settings."""
    field, ratios, untuned = "makespan_s", [], []
    for cell in side_by_side:
        ours = score(cell, found, Rival(OURS), field)
        best = {each.policy: each for each in _best_of_each(cell, found, field)}["dynamo-1.6"]
        ratios.append(ours / score(cell, found, best, field))
        untuned.append(ours / score(cell, found, Rival("dynamo-1.6"), field))
    name = "mean side by side: makespan_s beside dynamo-1.6"
    note = f"untuned {fmean(untuned):.2f}"
    return Row(name, fmean(ratios), 1.0, "ratio", MAKESPAN_GOAL, lower=True, note=note)


# ── users ────────────────────────────────────────────────────────────────────────────────────────


def users_cases(plan: Plan, found: Found) -> Iterator[Case]:
    for cell in user_cells(plan):
        yield from searched(cell, found, (*UNTUNED, ROUND_ROBIN))


def user_cells(plan: Plan) -> Iterator[Cell]:
    """One for each number of workers."""
    for workers in USER_WORKERS:
        options = (("users", USERS_A_WORKER * workers),)
        fields = {"source": "chat-users", "options": options, "workers": workers}
        most = (plan.requests or 1_000_000) // ChatUsers().turns
        conversations = min(CONVERSATIONS_A_WORKER * workers, most)
        name = f"{workers} workers, {USERS_A_WORKER * workers} users"
        seeds = (plan.first_seed, plan.seeds)
        yield Cell(_PHYSICS, name, fields, conversations, *seeds, FIGURES, (3, 1), plan.stride)


def users_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for cell in user_cells(plan):
        for field in FIGURES:
            yield _beside_best(cell, found, field)
        ours, theirs = cell.cases(Rival(OURS)), cell.cases(ROUND_ROBIN)
        name = f"{cell.traffic} ttft_mean_s beside round-robin"
        yield row(name, found, ours, theirs, "ttft_mean_s", AHEAD_GOAL)


# ── documents ────────────────────────────────────────────────────────────────────────────────────


def documents_cases(plan: Plan, found: Found) -> Iterator[Case]:
    for cell in document_cells(plan):
        yield from searched(cell, found, (*UNTUNED, ROUND_ROBIN))


def document_cells(plan: Plan) -> Iterator[Cell]:
    """One for each number of workers."""
    for workers in DOCUMENT_WORKERS:
        options = (("requests_per_s", DOCUMENT_REQUESTS_PER_S * workers),)
        fields = {"source": "documents", "options": options, "workers": workers}
        requests = min(DOCUMENT_REQUESTS_A_WORKER * workers, plan.requests or 1_000_000)
        seeds = (plan.first_seed, plan.seeds)
        name = f"{workers} workers"
        yield Cell(_PHYSICS, name, fields, requests, *seeds, FIGURES, (3, 1), plan.stride)


def documents_rows(plan: Plan, found: Found) -> Iterator[Row]:
    for cell in document_cells(plan):
        for field in FIGURES:
            yield _beside_best(cell, found, field)


# ── rows of all ──────────────────────────────────────────────────────────────────────────────────


def _beside_best(cell: Cell, found: Found, field: str) -> Row:
    """The row of a figure: beside the best tuned rival, with the best of each policy as a note."""
    best = _best_of_each(cell, found, field)
    ours = score(cell, found, Rival(OURS), field)
    rival = min(best, key=lambda each: score(cell, found, each, field))
    named = [(each, each.label) for each in best]
    named += [(each, f"untuned {each.policy}") for each in UNTUNED[:2]]
    ratios = [f"{label} {ours / score(cell, found, each, field):.2f}" for each, label in named]
    name = f"{cell.traffic} {field}"
    made = row(name, found, cell.cases(Rival(OURS)), cell.cases(rival), field, 1.0)
    return replace(made, note="; ".join(ratios))


def _best_of_each(cell: Cell, found: Found, field: str) -> list[Rival]:
    """The best settings of each policy that was replayed with all requests."""
    best: dict[str, Rival] = {}
    for rival in replayed_rivals(cell, found, UNTUNED):
        other = best.get(rival.policy, rival)
        best[rival.policy] = min(other, rival, key=lambda each: score(cell, found, each, field))
    return list(best.values())


def _computed(cell: Cell, found: Found) -> Row:
    """The row of how many times a shared prefix was computed, beside the least of the rivals."""
    ours = score(cell, found, Rival(OURS), COMPUTED)
    others = [
        (score(cell, found, rival, COMPUTED), rival.label)
        for rival in _best_of_each(cell, found, COMPUTED)
    ]
    note = "; ".join(f"{label} {times:.2f}" for times, label in others)
    name = f"{cell.traffic} {COMPUTED}"
    return Row(name, ours, min(others)[0], "times", 1.0, lower=True, note=note)
