"""Replays of the router as it is built."""

from random import Random

import pytest
from msgspec.structs import asdict, replace
from scheduling_runs import Case, append_to_journal, core_of, read_journal, run
from scheduling_sections import SECTIONS, Plan

from router.config.core import make_core
from router.config.router import RouterConfig
from router.scheduler.settings import PolicySettings
from router.simulator.summary import Summary

SMALL = {"source": "multi-turn", "requests": 200}


def test_core_of_a_case_is_that_of_the_router_as_it_ships():
    ours, shipped = (
        core_of(Case(**SMALL, policy="predictive"), Random(1)),
        make_core(RouterConfig(), Random(1)),
    )
    assert ours.settings == replace(shipped.settings, router_id=ours.settings.router_id)


def test_settings_of_a_case_reach_its_core():
    told = (("prefill_load_scale", 8.0), ("decode_active_request_weight", 2.0))
    settings = core_of(Case(**SMALL, policy="dynamo-1.6", settings=told), Random(1)).settings
    assert settings.default_policy == "dynamo-1.6"
    assert settings.policy == PolicySettings(**dict(told))


@pytest.mark.parametrize("policy", ["predictive", "cache-aware"])
def test_every_request_of_a_case_is_served(policy):
    summary = run(Case(**SMALL, policy=policy, slow_workers=8))
    assert (summary.served, summary.unserved) == (200, 0)


def test_learning_is_compared_with_the_best_of_each_grid():
    plan, section = Plan("trace", 2, (1.0,), None), SECTIONS["learning"]
    cases = list(section.cases(plan, {}))
    fields = dict.fromkeys(Summary.__struct_fields__, 1.0)
    found = {case: Summary(**fields) for case in cases}
    tuned = {"policy": "dynamo-1.0", "settings": (("prefill_load_scale", 8.0),)}
    best = plan.cases(**tuned, slow_workers=8)[0]
    found[best] = Summary(**fields | {"ttft_mean_s": 0.5})
    rows = {row.name: row for row in section.rows(plan, found)}
    assert f"half slow, best: {best.label} ttft_mean_s" in rows
    assert {case.policy for case in cases} >= {"predictive", "dynamo-1.6", "lmetric", "cache-aware"}


def test_journal_keeps_every_replay(tmp_path):
    """Figures that there were none of, as of sessions, are not a number."""
    case = Case(**SMALL, policy="llm-d", settings=(("affinity", 0.5),))
    summary = run(case)
    append_to_journal(tmp_path / "journal", case, summary)
    (found,) = read_journal(tmp_path / "journal").items()
    assert found[0] == case
    for name, value in asdict(summary).items():
        assert getattr(found[1], name) == pytest.approx(value, nan_ok=True)
    assert read_journal(tmp_path / "none") == {}
