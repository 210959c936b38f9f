"""Rivals of the section `physics`: each tuned for every fleet and traffic."""

import pytest
from scheduling import SPLITS
from scheduling_hybrid import FLEETS, hybrid_cases, hybrid_cells, hybrid_rows
from scheduling_physics import CANDIDATES, UNTUNED, Rival, cells, physics_cases, physics_rows
from scheduling_sections import OURS, Plan

from router.simulator.physics import PHYSICS
from router.simulator.summary import Summary

PLAN = Plan("trace", 2, (), 800, ("noise",), ("multi-turn",))
BEST = CANDIDATES[7]


def summary(ttft_s):
    names = Summary.__struct_fields__
    figures = {"ttft_mean_s": ttft_s, "e2e_mean_s": 2 * ttft_s, "unserved": 0}
    return Summary(**dict.fromkeys(names, 1) | figures)


def replay(case):
    """Every rival is as good as it is near to the best; ours is in between."""
    if case.policy == OURS:
        return summary(1.05)
    rival = Rival(case.policy, case.settings)
    return summary(2.0 if rival in UNTUNED else 1.0 + 0.1 * abs(CANDIDATES.index(rival) - 7))


def searched(plan):
    found, rounds = {}, []
    while missing := [case for case in physics_cases(plan, found) if case not in found]:
        found.update((case, replay(case)) for case in missing)
        rounds.append(len(set(missing)))
    return found, rounds


def test_candidates_are_halved_and_the_best_is_replayed_with_all_seeds():
    found, rounds = searched(PLAN)
    assert len(rounds) == 4
    assert rounds[0] == len(CANDIDATES) + 3 * 2
    assert rounds[1:3] == [len(CANDIDATES) // 8, len(CANDIDATES) // 64]
    (cell,) = cells(PLAN)
    assert [case.seed for case in cell.cases(BEST)] == [0, 1]
    assert all(case in found for case in cell.cases(BEST))
    assert {case.requests for case in found} == {800, 50, 100, 200}


def test_rows_compare_with_the_best_and_note_the_untuned():
    found, _ = searched(PLAN)
    ttft, e2e, *medians = physics_rows(PLAN, found)
    assert ttft.ratio == pytest.approx(1.05)
    assert e2e.ratio == pytest.approx(1.05)
    assert not ttft.holds
    assert ttft.note == "dynamo-1.0 32, dynamo-1.0 0.53, dynamo-1.6 0.53"
    assert medians[0].note == "behind in 1 of 1, by up to 1.050"


def test_best_weight_at_the_end_of_the_grid_is_on_the_edge():
    assert Rival("dynamo-1.0", (("prefill_load_scale", 1_024.0),)).is_on_edge
    assert Rival("dynamo-1.0", (("prefill_load_scale", 0.25),)).is_on_edge
    assert not Rival("dynamo-1.6", (("decode_active_request_weight", 0.0),)).is_on_edge
    assert not BEST.is_on_edge


def test_releases_look_at_other_seeds():
    look, release = (Plan("t", 5, (), 9, (), ("agents",), *split) for split in SPLITS.values())
    seeds = [{case.seed for case in physics_cases(plan, {})} for plan in (look, release)]
    assert not seeds[0] & seeds[1]
    assert len(list(cells(look))) == sum(not each.layers for each in PHYSICS.values())


def test_rivals_know_full_attention_only_of_hybrid_models():
    plan = Plan("trace", 2, (), 800, FLEETS[:1], ("multi-turn",), stride=12)
    found = {}
    while missing := [case for case in hybrid_cases(plan, found) if case not in found]:
        found.update((case, replay(case)) for case in missing)
    assert all(case.full_only for case in found if case.policy != OURS)
    assert {case.full_only for case in found if case.policy == OURS} == {True, False}
    assert {case.physics for case in found} == set(FLEETS[:1])
    assert len(list(hybrid_rows(plan, found))) == 5
    assert [cell.traffic for cell in hybrid_cells(plan)] == ["multi-turn", "8 × 16 rollouts"]
