"""Requests that wait in a router, in virtual time."""

import numpy as np
import pytest

from router.config.router import RouterConfig
from router.core.core import RouterCore
from router.indexer.radix_tree.radix_tree import RadixTree
from router.runtime.process.settings import configured
from router.simulator.engine_model import llama_8b
from router.simulator.scenario import Failure, Scenario
from router.simulator.simulation import simulate
from router.simulator.traces import Trace, TraceRequest

BURST = [
    TraceRequest(0.01 * i, 4000 + i, 3, [9000 + 7 * i + j for j in range(7)], "ab"[i % 4 == 3])
    for i in range(60)
]


def run(threshold, models=2, incidents=(), **settings):
    config = configured(
        RouterConfig, policy="dynamo-1.0", router_queue_threshold=threshold, **settings
    )
    scenario = Scenario(models=(llama_8b(),) * models, incidents=incidents)
    trace = Trace("burst", 512, BURST)
    return simulate(trace, scenario, lambda rng: RouterCore(config.core, RadixTree, rng))


def test_waiting_requests_are_served_and_runs_are_bit_exact():
    found, again = run(0.0), run(0.0)
    assert not np.isnan(found.ttft_s).any()
    assert (found.wait_s > 1.0).any()
    assert (found.wait_s <= found.ttft_s).all()
    assert found.e2e_s.tobytes() == again.e2e_s.tobytes()
    assert not run(None).wait_s.any()


def test_the_smaller_tenant_waits_less_than_it_would_unnamed():
    small = np.array([request.tenant == "b" for request in BURST])
    waited = run(0.0).wait_s
    assert waited[small].mean() < 0.6 * waited[~small].mean()


def test_requests_past_their_wait_limit_give_up():
    found = run(0.0, max_wait_s=1.0)
    gave_up = np.isnan(found.ttft_s)
    assert 0 < gave_up.sum() < len(BURST)
    assert np.nanmax(found.wait_s) <= 1.2


@pytest.mark.parametrize("workers", [1, 2])
def test_dead_worker_loses_no_request(workers):
    found = run(0.0, workers, (Failure(1.0, 0, 3.0),))
    assert not np.isnan(found.ttft_s).any()
