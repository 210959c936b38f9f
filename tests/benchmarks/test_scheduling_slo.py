"""The section `slo`: the load at which the best rival meets 90 %, and what is compared there."""

import pytest
from scheduling_runs import Case
from scheduling_sections import OURS, Plan
from scheduling_slo import RIVALS, slo_cases, slo_rows

from router.simulator.summary import Summary

PLAN = Plan("folder/trace", 2, (), 300)
LIMITS = {"lmetric": 2.0, OURS: 3.0}
"""The speed up to which a policy meets everything; others meet 50 % at any."""


def replay(case):
    goodput = 1.0 if case.arrival_speed <= LIMITS.get(case.policy, 0.0) else 0.5
    numbers = dict.fromkeys(Summary.__struct_fields__, 0) | {"served": 290, "unserved": 10}
    return Summary(**numbers | {"goodput": goodput, "refused": 3})


def searched(plan):
    found = {}
    while missing := [case for case in slo_cases(plan, found) if case not in found]:
        found.update((case, replay(case)) for case in missing)
    return found


def test_all_are_compared_at_the_highest_load_at_which_a_rival_meets_nine_in_ten():
    found = searched(PLAN)
    assert all(case.slo and case.half == 1 and case.requests == 300 for case in found)
    (made,) = slo_rows(PLAN, found)
    ours = [case for case in found if case.policy == OURS]
    assert {case.seed for case in ours} == {0, 1}
    (speed,) = {case.arrival_speed for case in ours}
    assert 1.9 < speed <= 2.0
    assert made.name == f"trace at {speed:.2f}, lmetric: goodput"
    assert (made.ours, made.peer, made.ratio) == (100, 100, 1)
    for part in (
        "ours \u2265 95%",
        "1.0% refused",
        "without refusals 100.0%",
        "least-loaded 50.0%",
    ):
        assert part in made.note
    assert made.holds


def test_made_up_workloads_are_whole_and_a_stride_leaves_rivals_out():
    found = searched(Plan("trace", 1, (), 300, workloads=("multi-turn",), stride=12))
    assert {case.half for case in found if case.source == "multi-turn"} == {0}
    assert {case.label for case in found if case.policy != OURS} == {
        Case(source="", policy=policy, settings=settings).label for policy, settings in RIVALS[:3]
    }


def test_ours_that_meets_less_than_the_best_rival_does_not_hold():
    found = searched(PLAN)
    worse = {
        case: replay(case) if case.policy != OURS else replay(Case(source="", policy="x"))
        for case in found
    }
    (made,) = slo_rows(PLAN, worse)
    assert made.ratio == pytest.approx(0.5)
    assert not made.holds
    assert "ours < 95%" in made.note
