from random import Random

import pytest

from router.simulator.workloads.contexts import LONGEST_PROMPT_TOKENS
from router.simulator.workloads.registry import WORKLOADS
from router.simulator.workloads.timed import Agents, Documents, LongTail, MultiTurn, SharedPrompts


def reuse(trace):
    """Of all full blocks, those that an endless cache shared by all would have had."""
    seen, hits, blocks = set(), 0, 0
    for request in trace.requests:
        blocks += len(request.sequence_hashes)
        hits += sum(each in seen for each in request.sequence_hashes)
        seen.update(request.sequence_hashes)
    return hits / blocks


@pytest.mark.parametrize(
    "name", ["shared-prompts", "multi-turn", "agents", "long-tail", "documents"]
)
def test_every_workload_keeps_its_promises(name):
    workload = WORKLOADS[name](requests=400)
    trace = workload.trace(64, Random(1))
    arrivals = [request.arrival_s for request in trace.requests]
    assert len(arrivals) == 400
    assert arrivals == sorted(arrivals)
    for request in trace.requests:
        assert 1 <= request.isl_tokens <= LONGEST_PROMPT_TOKENS
        assert request.osl_tokens >= 1
        assert len(request.sequence_hashes) == request.isl_tokens // 64
        assert len(set(request.sequence_hashes)) == len(request.sequence_hashes)
    assert workload.trace(64, Random(1)) == trace
    assert workload.trace(64, Random(2)) != trace


def test_requests_come_as_often_as_asked():
    for workload in (SharedPrompts(requests=3000), LongTail(requests=3000)):
        last_s = workload.trace(512, Random(3)).requests[-1].arrival_s
        assert last_s == pytest.approx(3000 / workload.requests_per_s, rel=0.1)


def test_shared_prefixes_have_the_configured_shape():
    assert reuse(LongTail(requests=500).trace(64, Random(1))) == 0
    assert reuse(SharedPrompts(requests=500).trace(64, Random(1))) > 0.6
    assert reuse(Agents(requests=500).trace(64, Random(1))) > 0.7
    assert reuse(MultiTurn(requests=500).trace(64, Random(1))) > 0.4


def test_a_turn_repeats_the_conversation_so_far():
    one = MultiTurn(requests=60, turns=3, requests_per_s=0.01).trace(16, Random(5))
    followed = sum(
        after.sequence_hashes[: len(before.sequence_hashes)] == before.sequence_hashes
        for before in one.requests
        for after in one.requests
        if after.arrival_s > before.arrival_s
    )
    assert followed > 30


def test_a_few_long_prompts_are_most_of_the_long_tail():
    tokens = sorted(r.isl_tokens for r in LongTail(requests=2000).trace(512, Random(1)).requests)
    assert sum(tokens[-200:]) > 0.4 * sum(tokens)
    assert tokens[1000] < 1000


@pytest.mark.parametrize("part", [0, 0.1, 1])
def test_documents_are_a_part_of_the_requests_and_come_once(part):
    workload = Documents(requests=200, documents_part=part, document_tokens=60_000)
    long = [r for r in workload.trace(64, Random(1)).requests if r.isl_tokens >= 30_000]
    assert len(long) == min(200 * part, 199)
    assert len({r.sequence_hashes[0] for r in long}) == len(long)
