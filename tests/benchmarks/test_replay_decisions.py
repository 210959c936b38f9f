"""Decisions of another router, held against ours from the same state."""

from replay_decisions import Agreement, agreement_with
from replay_run import Decision, PeerRun, Routed, Served

from router.simulator.traces import Trace, TraceRequest

A, B = [11, 12], [21, 22]
"""Two prompts of two blocks."""


def run_of(*reported):
    """Requests as (prompt, arrival, first token, last token, worker, cost), and their choice."""
    requests, served, decisions = [], {}, []
    for place, (prompt, arrival_s, first_s, last_s, worker, cost) in enumerate(reported):
        name, times_ms = str(place), [1e3 * each for each in (arrival_s, first_s, last_s)]
        requests.append(TraceRequest(arrival_s, 1024, 10, prompt))
        served[name] = Served(name, *times_ms, 1024, [Routed(worker)])
        decisions.append(Decision(name, worker, cost))
    return Trace("made up", 512, requests), PeerRun({}, served, decisions)


def test_replayed_decisions_credit_computed_blocks_and_free_ended_requests():
    trace, run = run_of((A, 0, 1, 2, 0, 4.0), (B, 0, 1, 5, 1, 4.0), (A, 3, 4, 5, 0, 2.0))
    assert agreement_with(trace, run, 2, 100) == Agreement(3, 3, 3)


def test_other_choice_of_equal_cost_is_no_agreement():
    trace, run = run_of((A, 0, 1, 2, 0, 4.0), (B, 0, 1, 2, 0, 8.0), (A, 0.5, 1, 2, 0, 7.0))
    assert agreement_with(trace, run, 2, 100) == Agreement(3, 1, 2)
