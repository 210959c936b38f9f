"""Simulated requests with objectives: who has which, and what counts as met."""

from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from router.simulator.simulation import simulate
from router.simulator.summary import summarize
from router.simulator.workloads.objectives import ObjectiveMix
from support.fleets.simulator_worlds import make_core, scenario, small_trace

MIX = ObjectiveMix(interactive_isl_tokens=3_000)


def kept(trace, cores):
    def make(rng):
        cores.append(make_core(default_policy="predictive")(rng))
        return cores[-1]

    return simulate(trace, scenario(2), make)


def test_a_part_of_the_short_prompts_is_interactive():
    trace = MIX.given_to(small_trace(400), Random(1))
    tight = [each for each in trace.requests if each.slo_ttft_ms == MIX.interactive_ttft_ms]
    short = [each for each in trace.requests if each.isl_tokens <= 3_000]
    assert all(each.slo_tpot_ms == MIX.interactive_tpot_ms for each in tight)
    assert all(each.isl_tokens <= 3_000 for each in tight)
    assert len(tight) == pytest.approx(0.7 * len(short), rel=0.15)
    assert all(each.slo_ttft_ms in (3_000.0, 30_000.0) for each in trace.requests)
    assert MIX.given_to(small_trace(400), Random(1)) == trace


def test_goodput_is_that_of_the_router_as_well_and_refused_requests_miss():
    mix, cores = replace(MIX, interactive_tpot_ms=0.1), []
    outcomes = kept(mix.given_to(small_trace(400, gap_s=0.3), Random(1)), cores)
    summary = summarize(outcomes)
    (totals,) = cores[0].tracker.promises.totals.values()
    assert 0 < summary.refused == totals["refused"] == summary.unserved
    assert summary.goodput == pytest.approx(totals["met"] / 400, abs=0.02)
    assert not outcomes.meets[outcomes.refused == 1].any()
    assert totals["unknown"] == 0


def test_without_objectives_there_is_no_goodput():
    summary = summarize(kept(small_trace(20), []))
    assert np.isnan(summary.goodput)
    assert summary.refused == 0
