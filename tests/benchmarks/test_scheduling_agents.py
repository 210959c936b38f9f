"""The sections `agents`, `rollouts` and `users`: their loads, and what their rows compare."""

import pytest
from scheduling_agents import (
    UNTUNED,
    agent_cells,
    agents_cases,
    agents_rows,
    documents_cases,
    documents_rows,
    rollouts_cases,
    rollouts_rows,
    users_cases,
    users_rows,
)
from scheduling_physics import CANDIDATES, Rival
from scheduling_runs import Case, run
from scheduling_sections import OURS, Plan

from router.simulator.summary import Summary

PLAN = Plan("trace", 1, (), 350)
BEST = Rival("lmetric")


def summary(seconds, **fields):
    times = {"ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "session_mean_s", "makespan_s"}
    times.add("prefixes_computed")
    numbers = {name: seconds if name in times else 0 for name in Summary.__struct_fields__}
    return Summary(**numbers | fields)


def replay(case):
    """The best rival takes a second, ours 0.9; others two."""
    if case.arrival_speed == 10.0:
        return summary(9.0, requests_per_s=2.0, served=400, sessions=10)
    if case.policy == OURS:
        return summary(0.9)
    return summary(1.0 if Rival(case.policy, case.settings) == BEST else 2.0)


def searched(cases):
    found = {}
    while missing := [case for case in cases(PLAN, found) if case not in found]:
        found.update((case, replay(case)) for case in missing)
    return found


def test_loads_are_fractions_of_the_saturated_fleets_sessions():
    found = searched(agents_cases)
    speeds = [cell.fields["arrival_speed"] for cell in agent_cells(PLAN, found)]
    assert speeds == pytest.approx([0.7 * 0.05 / 0.1, 0.95 * 0.05 / 0.1])
    assert {case.requests for case in found if case.arrival_speed != 10.0} == {2, 5, 10}


def test_agents_are_compared_with_the_best_rival_and_each_policy():
    rows = list(agents_rows(PLAN, searched(agents_cases)))
    assert len(rows) == 2 * 4
    for each in rows:
        assert each.ratio == pytest.approx(0.9)
        assert each.holds
        assert "lmetric 0.9" in each.note or "lmetric 1.00" in each.note
    assert "untuned dynamo-1.6 0.45" in rows[0].note


def test_rollouts_have_a_mean_for_groups_side_by_side():
    rows = list(rollouts_rows(PLAN, searched(rollouts_cases)))
    assert len(rows) == 2 * 6 * 4 + 2
    makespan, computed = rows[-2:]
    assert (makespan.ratio, makespan.holds) == (pytest.approx(0.45), True)
    assert (computed.ours, computed.goal) == (pytest.approx(0.9), 1.3)


def test_users_are_compared_with_the_best_rival_and_round_robin():
    rows = list(users_rows(PLAN, searched(users_cases)))
    assert len(rows) == 3 * 4
    best, beside = rows[0], rows[3]
    assert (best.ratio, best.goal) == (pytest.approx(0.9), 1.0)
    assert (beside.ratio, beside.goal) == (pytest.approx(0.45), 0.8)
    assert beside.name == "2 workers, 4 users ttft_mean_s beside round-robin"


def test_documents_are_compared_with_the_best_rival_on_fleets_of_each_size():
    rows = list(documents_rows(PLAN, searched(documents_cases)))
    assert len(rows) == 4 * 3
    assert rows[0].name == "2 workers ttft_mean_s"
    assert [row.ratio for row in rows] == pytest.approx([0.9] * 12)


def test_untuned_rivals_are_distinct_and_one_of_each_policy():
    assert len({rival.policy for rival in UNTUNED}) == len(UNTUNED) == 4
    assert {rival.policy for rival in UNTUNED} <= {rival.policy for rival in CANDIDATES}


@pytest.mark.parametrize(
    ("source", "options", "sessions"),
    [
        ("agentic-code", (("fan_out_chance", 0.2),), 4),
        ("chat-users", (), 4),
        ("rollouts", (("prompts", 8),), 4),
    ],
)
def test_closed_loops_are_replayed_on_the_workers_of_a_case(source, options, sessions):
    case = Case(
        source=source,
        policy="predictive",
        options=options,
        requests=sessions,
        workers=3,
        physics="deferring",
    )
    replayed = run(case)
    assert (replayed.sessions, replayed.unserved) == (sessions, 0)
    assert replayed.prefixes_computed >= 1.0
    assert replayed.requests_per_s > 0
