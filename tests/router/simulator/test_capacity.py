"""Capacity as a router reports it, against the throughput of a simulated fleet."""

from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from router.core.commands import Tick
from router.core.views.capacity import capacity
from router.simulator.engine_model import llama_8b
from router.simulator.simulation import simulate
from router.simulator.traces import Trace, TraceRequest
from support.fleets.simulator_worlds import hashes_of, make_core, scenario

WORKERS = 2
SMALL = replace(llama_8b(), capacity_tokens=40_000)
"""Its memory limits how many requests run at once, so an overloaded fleet is soon steady."""


def trace(requests_per_s, seconds, families):
    rng, now_s, made = Random(4), 0.0, []
    while now_s < seconds:
        now_s += rng.expovariate(requests_per_s)
        isl_tokens, family = rng.randint(1_000, 3_000), rng.randrange(families)
        blocks = hashes_of(family, isl_tokens // 16)
        made.append(TraceRequest(now_s, isl_tokens, rng.randint(50, 150), blocks))
    return Trace("steady", 16, made)


def served(requests_per_s, seconds, families, **settings):
    """Return the results, and the capacity once a second."""
    made, found = make_core(max_reservations=100_000, **settings), []

    def watched(rng):
        core = made(rng)
        handle = core.handle

        def note(command, now_s):
            handled = handle(command, now_s)
            if isinstance(command, Tick) and now_s >= len(found):
                found.append((now_s, *capacity(core, now_s)))
            return handled

        core.wrap(note)
        return core

    steady = trace(requests_per_s, seconds, families)
    return simulate(steady, scenario(WORKERS, model=SMALL), watched), found


@pytest.mark.parametrize(
    ("families", "too_many_per_s", "loads", "tolerance"),
    [(1_000_000, 45.0, (0.25, 0.6), 0.15), (4, 150.0, (0.5,), 0.15)],
    ids=["nothing shared", "prompts shared"],
)
def test_load_of_a_fleet_is_reported(families, too_many_per_s, loads, tolerance):
    """The throughput is that of a fleet asked for more than it can serve."""
    outcomes, overloaded = served(too_many_per_s, 32.0, families)
    ended_s = outcomes.arrivals_s + outcomes.e2e_s
    most_per_s = float(((ended_s > 12) & (ended_s < 32)).sum()) / 20
    assert overloaded[30][1].saturation > 1
    assert overloaded[30][1].workers_wanted > 0
    for load in loads:
        _, found = served(load * most_per_s, 75.0, families)
        whole = [pool for now_s, pool in found if 62 < now_s <= 75]
        shown = [pool.saturation for pool in whole]
        assert np.mean(shown) == pytest.approx(load, rel=tolerance)
        assert np.std(shown) < 0.1 * load
        assert {pool.confidence for pool in whole} == {"measured"}
        assert len({pool.workers_needed for pool in whole}) == 1
