"""Requests that wait for others, in virtual time."""

from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from router.simulator.engine_model import llama_8b
from router.simulator.scenario import Failure
from router.simulator.simulation import simulate
from router.simulator.summary import session_times_s, summarize
from router.simulator.traces import FollowUps, Trace, TraceRequest
from router.simulator.workloads.agentic_code import AgenticCode
from router.simulator.workloads.chat_users import ChatUsers
from router.simulator.workloads.rollouts import Rollouts
from support.fleets.simulator_worlds import hashes_of, make_core, scenario


def request(arrival_s=0.0, *, session=0, after=(), think_s=0.0, blocks=20, family=0):
    hashes = hashes_of(family, blocks)
    return TraceRequest(arrival_s, blocks * 16 + 1, 5, hashes, None, session, after, think_s)


def run(requests, workers=2, **fields):
    return simulate(Trace("loop", 16, requests), scenario(workers, **fields), make_core())


def test_a_turn_arrives_its_think_time_after_the_response():
    outcomes = run([request(1.0), request(after=(0,), think_s=2.5), request(after=(1,))])
    ends_s = outcomes.arrivals_s + outcomes.e2e_s
    assert outcomes.arrivals_s[0] == 1.0
    assert outcomes.arrivals_s[1] == ends_s[0] + 2.5
    assert outcomes.arrivals_s[2] == ends_s[1]
    assert session_times_s(outcomes).tolist() == [ends_s[2] - 1.0]


def test_a_parent_waits_for_all_of_its_children():
    parent, *children = request(), *(request(after=(0,), blocks=n * 100) for n in (1, 9, 3))
    outcomes = run([parent, *children, request(after=(1, 2, 3), think_s=1.0)])
    ends_s = outcomes.arrivals_s + outcomes.e2e_s
    assert np.all(outcomes.arrivals_s[1:4] == ends_s[0])
    assert outcomes.arrivals_s[4] == ends_s[1:4].max() + 1.0
    assert len(set(ends_s[1:4])) == 3


def test_sessions_go_on_side_by_side():
    """A slow fleet is asked less, and later."""
    slow = replace(llama_8b(), base_s=0.1)
    turns = [request(0.0, session=0), request(after=(0,), session=0)]
    others = [request(0.05, session=1), request(0.05, after=(2,), session=1, think_s=3.0)]
    fast, late = run(turns + others), run(turns + others, model=slow)
    assert late.arrivals_s[2] > fast.arrivals_s[2]
    assert summarize(late).session_mean_s > summarize(fast).session_mean_s
    assert summarize(fast).sessions == 2


def test_what_follows_a_request_that_is_given_up_never_arrives():
    small = replace(llama_8b(), capacity_tokens=8192)
    impossible = request(2.0, session=1, blocks=600)
    others = [request(2.0, after=(1,), session=1), request(2.0, after=(1, 2), session=1)]
    outcomes = run([request(), impossible, *others, request(3.0, session=2)], model=small)
    summary = summarize(outcomes)
    assert (summary.served, summary.unserved, summary.sessions) == (2, 3, 2)
    assert np.all(outcomes.arrivals_s[3:] >= 60.0)
    assert outcomes.attempts[3:].tolist() == [0, 0]


def test_sessions_survive_a_worker_that_dies():
    trace = Rollouts(groups=4, prompts=6, at_once=2, pause_s=0.1).trace(512, Random(1))
    failure = Failure(at_s=1.0, worker=0, down_s=2.0)
    summary = summarize(simulate(trace, scenario(incidents=(failure,)), make_core()))
    assert (summary.unserved, summary.sessions) == (0, 4)
    assert summary.retried > 0


def test_shared_prefixes_are_counted_once_for_each_computation():
    """Apart in time, so that the second finds the first's blocks; then one elsewhere."""
    alone = [request(0.0), request(5.0, family=1)]
    assert np.isnan(summarize(run(alone)).prefixes_computed)
    together = [request(0.0), request(5.0), request(10.0, family=1)]
    assert summarize(run(together)).prefixes_computed == 1.0
    apart = [request(0.0), request(0.0), request(5.0)]
    assert summarize(run(apart, event_lag_s=0.0)).prefixes_computed == 2.0


def test_the_makespan_is_from_the_first_arrival_to_the_last_end():
    outcomes = run([request(2.0), request(2.0, after=(0,), think_s=7.0)])
    assert summarize(outcomes).makespan_s == outcomes.arrivals_s[1] + outcomes.e2e_s[1] - 2.0


@pytest.mark.parametrize(
    "workload", [AgenticCode(sessions=3), ChatUsers(conversations=8), Rollouts(groups=6)]
)
def test_a_closed_loop_gives_the_same_bits(workload):
    trace = workload.trace(512, Random(1))

    def columns():
        outcomes = simulate(trace, scenario(routers=2), make_core(1.0, 0.5))
        return [getattr(outcomes, name) for name in outcomes.__struct_fields__]

    pairs = list(zip(columns(), columns(), strict=True))
    assert all(np.array_equal(one, two, equal_nan=True) for one, two in pairs)
    assert len(pairs[0][0]) == len(trace.requests)


def test_first_requests_of_a_closed_loop_are_a_trace():
    trace = AgenticCode(sessions=6).trace(512, Random(2))
    some = replace(trace, requests=trace.requests[:40])
    assert summarize(simulate(some, scenario(), make_core())).served == 40


def test_lost_requests_are_returned_once():
    follow_ups = FollowUps(
        [request(), request(), *(request(after=a) for a in ((0, 1), (2,), (1, 3)))]
    )
    assert follow_ups.lose(0) == [2, 3, 4]
    assert follow_ups.end(1) == []
    assert follow_ups.lose(1) == []
