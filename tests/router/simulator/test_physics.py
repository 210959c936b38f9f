"""Fleets that no policy was made for."""

import numpy as np
import pytest
from msgspec.structs import replace

from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges
from router.protocol.values import Rank
from router.recording.recorded_core import RecordedCore
from router.sequence.rank_table import CHUNK_TOKENS
from router.simulator.engine_model import llama_8b
from router.simulator.outcomes import FloatArray
from router.simulator.physics import PHYSICS
from router.simulator.scenario import Background, LoadSources
from router.simulator.simulation import simulate
from router.simulator.summary import summarize
from support.fleets.simulator_worlds import make_core, scenario, small_trace


def reports_of(**loads):
    """The load reports that a router received."""
    entries = []
    make = make_core()
    recorded = lambda rng: RecordedCore(make(rng), entries.append).core  # noqa: E731
    simulate(small_trace(200), scenario(loads=LoadSources(**loads)), recorded)
    commands = [entry.command for entry in entries]
    return [each.report for each in commands if hasattr(each, "report")]


def run(physics, **fields):
    base = PHYSICS[physics].scenario(arrival_speed=1.0, routers=1, seed=fields.pop("seed", 1))
    model = replace(llama_8b(), capacity_tokens=40_000)
    return simulate(small_trace(), replace(base, models=(model,) * 4, **fields), make_core())


@pytest.mark.parametrize("name", PHYSICS)
def test_every_request_is_served_and_the_same_seed_gives_the_same_bits(name):
    first, again = run(name), run(name)
    assert summarize(first).unserved == 0
    for field in first.__struct_fields__:
        value: FloatArray = getattr(first, field)
        assert np.array_equal(value, getattr(again, field), equal_nan=True)


@pytest.mark.parametrize("name", ["noise", "stragglers", "pauses", "warm-up", "speculation"])
def test_disturbances_change_the_times(name):
    plain, disturbed = run("plain"), run(name)
    assert not np.array_equal(plain.e2e_s, disturbed.e2e_s)


def test_silent_engines_report_nothing_but_that_they_live():
    reports = reports_of(source="none")
    assert len(reports) > 20
    assert {each.counters for each in reports} == {LoadCounters()}
    assert {each.gauges for each in reports} == {LoadGauges()}
    assert {each.constants for each in reports} == {LoadConstants()}


def test_lying_engines_report_a_multiple_of_their_busy_time():
    def busy_s(**loads):
        return [each.counters.busy_s for each in reports_of(**loads) if each.worker_id == 0][3]

    assert busy_s(busy_factors=(3.0, 1.0)) == pytest.approx(3 * busy_s())


def test_lost_reports_do_not_come():
    assert len(reports_of(lost=0.5)) < 0.75 * len(reports_of())


def test_unknown_chunk_is_the_routers_default():
    cores = []
    make = make_core()

    def kept(rng):
        cores.append(make(rng))
        return cores[0]

    fleet = scenario(model=replace(llama_8b(), chunk_tokens=512))
    simulate(small_trace(), replace(fleet, loads=LoadSources(shows_chunk=False)), kept)
    assert cores[0].ranks.row(Rank(0, 0))[CHUNK_TOKENS] == 8_192


def test_background_requests_delay_those_of_clients_and_are_not_counted():
    alone = simulate(small_trace(), scenario(2), make_core())
    busy = Background(requests_per_s=3.0)
    beside = simulate(small_trace(), scenario(2, background=busy), make_core())
    assert summarize(beside).served == summarize(alone).served == 120
    assert summarize(beside).e2e_mean_s > 1.2 * summarize(alone).e2e_mean_s
