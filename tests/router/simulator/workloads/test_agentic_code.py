"""Sessions of coding agents, beside those that aiperf generates."""

from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from router.simulator.workloads.agentic_code import AgenticCode

VECTORS = msgspec.json.decode(
    (Path(__file__).parents[3] / "vectors" / "agentic_code.json").read_bytes()
)["configurations"]
MEANS = {"context_tokens": 0.02, "new_tokens": 0.03, "output_tokens": 0.03}
"""The tolerances of means; others may differ by 4 %, and percentiles by 8 % or 2 turns."""


def sessions_of(trace):
    return [list(each) for _, each in groupby(trace.requests, attrgetter("session"))]


def statistics(trace):
    """What is known of aiperf's sessions as well."""
    sessions = sessions_of(trace)
    pairs = [pair for session in sessions for pair in pairwise(session)]
    return {
        "turns": [len(session) for session in sessions],
        "first_context_tokens": [session[0].isl_tokens for session in sessions],
        "last_context_tokens": [session[-1].isl_tokens for session in sessions],
        "context_tokens": [request.isl_tokens for request in trace.requests],
        "new_tokens": [two.isl_tokens - one.isl_tokens - one.osl_tokens for one, two in pairs],
        "output_tokens": [request.osl_tokens for request in trace.requests],
        "delay_s": [request.think_s for request in trace.requests if request.after],
        "session_delay_s": [sum(each.think_s for each in session) for session in sessions],
    }


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_sessions_are_distributed_as_aiperfs(vector):
    workload = AgenticCode(sessions=1500, fan_out_chance=0.0, **vector["workload"])
    found = statistics(workload.trace(4096, Random(1)))
    assert found.keys() == vector["statistics"].keys()
    for name, expected in vector["statistics"].items():
        assert np.mean(found[name]) == pytest.approx(expected["mean"], rel=MEANS.get(name, 0.04))
        for percent in (50, 90):
            value = np.percentile(found[name], percent)
            assert value == pytest.approx(expected[f"p{percent}"], rel=0.08, abs=2), name


def test_a_turn_repeats_all_of_its_session():
    for session in sessions_of(AgenticCode(sessions=20, fan_out_chance=0.0).trace(64, Random(2))):
        for one, two in pairwise(session):
            assert two.sequence_hashes[: len(one.sequence_hashes)] == one.sequence_hashes


def test_sessions_of_a_project_share_its_instructions():
    workload = AgenticCode(sessions=60, projects=2, fan_out_chance=0.0)
    starts = [session[0] for session in sessions_of(workload.trace(500, Random(3)))]
    shared = {tuple(each.sequence_hashes[:104]) for each in starts}
    assert len(shared) == 2
    assert len({hashes[:64] for hashes in shared}) == 1
    assert len({each.sequence_hashes[105] for each in starts if each.isl_tokens > 53_000}) > 50


@pytest.fixture(scope="module")
def fanned_out():
    return AgenticCode(sessions=60, fan_out_chance=0.2).trace(512, Random(4))


def test_followers_wait_for_earlier_requests_of_their_session(fanned_out):
    requests = fanned_out.requests
    for index, request in enumerate(requests):
        assert all(earlier < index for earlier in request.after)
        assert {requests[earlier].session for earlier in request.after} <= {request.session}
        assert request.arrival_s == requests[index - bool(request.after)].arrival_s
        assert request.isl_tokens < 200_000
        assert len(request.sequence_hashes) == request.isl_tokens // 512
    starts = [request.arrival_s for request in requests if not request.after]
    assert len(starts) == 60
    assert starts == sorted(starts)


def test_subagents_share_a_prefix_and_their_parent_goes_on_with_their_results(fanned_out):
    requests = fanned_out.requests
    children = {}
    for index, request in enumerate(requests):
        if request.after and request.think_s == 0 and len(request.after) == 1:
            children.setdefault(request.after[0], []).append(index)
    groups = [group for group in children.values() if len(group) > 1]
    assert len(groups) > 100
    sizes = {len(group) for group in groups}
    assert (min(sizes), max(sizes)) == (2, 8)
    for group in groups:
        firsts = [requests[index].sequence_hashes for index in group]
        shared = set(firsts[0]).intersection(*firsts)
        assert len(shared) * 512 > 12_000
        assert all(len(hashes) >= len(shared) for hashes in firsts)
    joined = [request for request in requests if len(request.after) > 1]
    assert len(joined) > 80
    for request in joined:
        results = sum(requests[child].osl_tokens for child in request.after)
        assert request.isl_tokens > results


def test_forks_go_on_with_their_parents_context():
    workload = AgenticCode(sessions=30, fan_out_chance=0.3, fork_chance=1.0)
    requests = workload.trace(512, Random(5)).requests
    forks = [each for each in requests if len(each.after) == 1 and each.think_s == 0]
    assert len(forks) > 50
    for fork in forks:
        parent = requests[fork.after[0]]
        whole = (parent.isl_tokens + parent.osl_tokens) // 512
        assert fork.sequence_hashes[: len(parent.sequence_hashes)] == parent.sequence_hashes
        assert len(fork.sequence_hashes) >= whole


def test_the_same_seed_makes_the_same_trace():
    workload = AgenticCode(sessions=10)
    assert workload.trace(512, Random(6)) == workload.trace(512, Random(6))
    assert workload.trace(512, Random(6)) != workload.trace(512, Random(7))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("median_new_tokens", 4_000, "new_tokens is 3500, less than the median 4000"),
        ("most_tool_s", 1.0, "most_tool_s is 1, less than the median 1.8"),
        ("context_limit_tokens", 50_000, "exceed context_limit_tokens"),
        ("fork_chance", 1.5, "Expected `float` <= 1.0"),
        ("turns", 3, "unknown field"),
    ],
)
def test_impossible_numbers_are_refused(name, value, reason):
    with pytest.raises(msgspec.ValidationError, match=reason):
        msgspec.convert({name: value}, AgenticCode)
