from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.simulator.disturbances import Disturbances, StepTimes
from router.simulator.engine import Engine
from router.simulator.engine_model import EngineModel, llama_70b
from router.simulator.engine_runs import Work
from router.simulator.traces import TraceRequest
from support.chaos.fuzzing import examples
from support.fleets.simulator_worlds import hashes_of

from .naive_engine import NaiveEngine

MODEL = EngineModel(
    chunk_tokens=64,
    base_s=0.02,
    prefill_token_s=0.001,
    attention_token2_s=1e-5,
    decode_request_s=0.0005,
    decode_kv_token_s=1e-5,
    capacity_tokens=40 * 8,
)


def played(engine, requests):
    """What became of requests: first token, end, cached blocks."""
    works = [
        Work(index, str(index), TraceRequest(*request)) for index, request in enumerate(requests)
    ]
    outcomes = {}
    firsts = {}
    coming = list(works)
    while coming or engine.due_s < inf:
        if coming and coming[0].request.arrival_s <= engine.due_s:
            work = coming.pop(0)
            engine.submit(work, work.request.arrival_s)
        else:
            now_s = engine.due_s
            progress = engine.advance()
            for work in progress.prefilled:
                firsts[work.caller] = now_s, work.cached_blocks
            for work in progress.finished:
                first_s, cached_blocks = firsts[work.caller]
                outcomes[work.caller] = (first_s, now_s, cached_blocks)
        engine.cache.check_invariants()
    return outcomes


def requests_of(rng, count, gap_s):
    requests, now_s = [], 0.0
    for _ in range(count):
        now_s += rng.expovariate(1 / gap_s)
        isl, osl = rng.randint(1, 150), rng.randint(1, 60)
        requests.append((now_s, isl, osl, hashes_of(rng.randint(0, 3), isl // 8)))
    return requests


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32), st.sampled_from([0.02, 0.3, 3.0]), st.booleans(), st.booleans())
def test_runs_of_steps_end_as_single_steps_do(seed, gap_s, reports_growth, defers):
    requests = requests_of(Random(seed), 25, gap_s)
    naive = NaiveEngine(MODEL, 8, requests, is_deferring=defers)
    expected = naive.run()
    disturbances = Disturbances(is_deferring=defers)
    engine = Engine(MODEL, 8, reports_growth=reports_growth, disturbances=disturbances)
    outcomes = played(engine, requests)
    assert outcomes.keys() == expected.keys()
    for index, (first_s, finish_s, cached) in expected.items():
        assert outcomes[index] == (pytest.approx(first_s), pytest.approx(finish_s), cached)
    counters = engine.counters(1e9)
    assert counters.steps == naive.steps
    assert counters.busy_s == pytest.approx(naive.busy_s)
    assert counters.requests_received == counters.requests_finished == len(requests)


@settings(max_examples=examples(60))
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.02, 0.3]),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.booleans(),
)
def test_preemption_and_speculation_end_as_single_steps_do(
    seed, gap_s, draft_tokens, reports, defers
):
    requests = requests_of(Random(seed), 25, gap_s)
    disturbances = Disturbances(
        is_preempting=True, is_deferring=defers, draft_tokens=draft_tokens, draft_s=0.004
    )
    times = StepTimes(MODEL, disturbances, Random(seed))
    naive = NaiveEngine(
        MODEL,
        8,
        requests,
        step_tokens=[times.tokens_a_step() for _ in requests],
        draft_tokens=draft_tokens,
        draft_s=0.004,
        is_preempting=True,
        is_deferring=defers,
    )
    expected = naive.run()
    engine = Engine(MODEL, 8, reports_growth=reports, disturbances=disturbances, rng=Random(seed))
    outcomes = played(engine, requests)
    assert outcomes.keys() == expected.keys()
    for index, (first_s, finish_s, cached) in expected.items():
        assert outcomes[index] == (pytest.approx(first_s), pytest.approx(finish_s), cached)
    seen = engine.observed(1e9)
    assert seen.preemptions == naive.preemptions
    assert seen.counters.busy_s == pytest.approx(naive.busy_s)
    assert engine.cache.used_blocks == 0


def test_equal_prompts_at_once_are_computed_once_if_admission_is_deferred():
    """The second is admitted in the step that completes the first, and finds its full blocks."""
    requests = [(0.0, 100, 3, hashes_of(1, 12)) for _ in range(3)]
    deferring = Engine(MODEL, 8, disturbances=Disturbances(is_deferring=True))
    outcomes = played(deferring, requests)
    assert [cached for _, _, cached in outcomes.values()] == [0, 12, 12]
    assert outcomes[1][0] == outcomes[0][0]
    assert deferring.observed(1e9).counters.prefill_tokens == 100 + 2 * 4
    at_once = played(Engine(MODEL, 8), requests)
    assert [cached for _, _, cached in at_once.values()] == [0, 0, 0]


def test_growing_requests_are_preempted_and_keep_their_output():
    """Two of 10 blocks each grow to 30 in a cache of 40: the second is computed anew."""
    preempting = Disturbances(is_preempting=True)
    requests = [(0.0, 79, 161, hashes_of(family, 9)) for family in (1, 2)]
    engine = Engine(MODEL, 8, disturbances=preempting)
    outcomes = played(engine, requests)
    seen = engine.observed(1e9)
    assert seen.preemptions == 1
    assert seen.generated_tokens == 2 * 161
    assert seen.counters.prefill_tokens > 2 * 79
    assert (seen.prompt_tokens, seen.queried_tokens) == (2 * 79, 2 * 79)
    assert outcomes[1][0] < outcomes[0][1] < outcomes[1][1]
    reserving = played(Engine(MODEL, 8), requests)
    assert reserving[1][0] > reserving[0][1]


def test_counters_explain_busy_seconds():
    """The cumulative counters of a report are the terms of the model."""
    engine = Engine(MODEL, 8, reports_growth=False)
    played(engine, requests_of(Random(3), 40, 0.2))
    c = engine.counters(1e9)
    explained = (
        MODEL.base_s * c.steps
        + MODEL.prefill_token_s * c.prefill_tokens
        + MODEL.attention_token2_s * c.prefill_token_contexts
        + MODEL.decode_request_s * c.decode_requests
        + MODEL.decode_kv_token_s * c.resident_kv_tokens
    )
    assert c.busy_s == pytest.approx(explained)


def test_one_request_by_hand():
    """4,096 tokens of which 512 are cached, 3 tokens out, on an idle 70 B engine."""
    engine = Engine(llama_70b(), 512, reports_growth=False)
    hashes = hashes_of(1, 8)
    (_, warm_end, _) = played(engine, [(0.0, 512, 1, hashes[:1])])[0]
    assert warm_end == pytest.approx(0.020 + 512 / 9000 + 512 * 256 * 1.85e-9)
    first = 0.020 + 2048 / 9000 + 2048 * (512 + 1024) * 1.85e-9
    second = 0.020 + 1536 / 9000 + 1536 * (2560 + 768) * 1.85e-9
    decode = 2 * (0.020 + 0.00015) + (4097 + 4098) * 2.0e-8
    outcome = played(engine, [(10.0, 4096, 3, hashes)])[0]
    assert outcome[2] == 1
    assert outcome[0] == pytest.approx(10 + first + second)
    assert outcome[1] == pytest.approx(10 + first + second + decode)


def test_at_least_one_token_is_computed():
    engine = Engine(MODEL, 8, reports_growth=False)
    hashes = hashes_of(1, 2)
    outcomes = played(engine, [(0.0, 16, 1, hashes), (9.0, 16, 1, hashes)])
    assert [cached for _, _, cached in outcomes.values()] == [0, 1]


def test_request_that_does_not_fit_waits():
    """Two of 25 blocks in a cache of 40: the second begins when the first is over."""
    engine = Engine(MODEL, 8, reports_growth=False)
    outcomes = played(engine, [(0.0, 150, 50, hashes_of(1, 18)), (0.0, 150, 50, hashes_of(2, 18))])
    assert outcomes[1][0] > outcomes[0][1]
    assert not engine.fits(TraceRequest(0.0, 300, 50, []))


def test_growth_is_reported_when_the_output_needs_another_block():
    engine = Engine(MODEL, 8, reports_growth=True)
    engine.submit(Work(0, "a", TraceRequest(0.0, 14, 20, hashes_of(1, 1))), 0.0)
    grown, tokens_out = [], 1
    while engine.due_s < inf:
        progress = engine.advance()
        tokens_out += progress.decoded_tokens
        grown += [tokens_out for _ in progress.grown]
    assert grown == [3, 11, 19]  # tokens out, as 17, 25 and 33 tokens need a block more


def test_a_slow_engine_takes_longer_from_the_next_step_on():
    """Steps of 0.02 s become 0.06 s long."""
    model = EngineModel(
        chunk_tokens=64,
        base_s=0.02,
        prefill_token_s=0.0,
        attention_token2_s=0.0,
        decode_request_s=0.0,
        decode_kv_token_s=0.0,
        capacity_tokens=800,
    )
    engine = Engine(model, 8, reports_growth=False)
    engine.submit(Work(0, "a", TraceRequest(0.0, 8, 21, hashes_of(1, 1))), 0.0)
    engine.advance()
    engine.slowness = 3.0
    engine.interrupt(0.21)  # in the tenth decoding step
    assert engine.due_s == pytest.approx(0.22)
    engine.advance()
    assert engine.due_s == pytest.approx(0.22 + 10 * 0.06)


def test_counters_and_gauges_in_the_middle_of_a_run():
    engine = Engine(MODEL, 8, reports_growth=False)
    engine.submit(Work(0, "a", TraceRequest(0.0, 8, 41, hashes_of(1, 1))), 0.0)
    engine.advance()
    engine.interrupt(0.0)
    started = engine.counters(engine.due_s - 1e-9)
    assert (started.steps, started.decode_requests, started.resident_kv_tokens) == (1, 0, 0)
    engine.advance()
    before = engine.counters(engine.due_s - 1e-9)
    end = engine.counters(engine.due_s)
    assert (before.steps, end.steps) == (40, 41)
    assert end.decode_requests == 40
    assert end.resident_kv_tokens == sum(range(9, 49))
    assert engine.gauges.running_requests == 1
    assert engine.gauges.kv_used_blocks == 7
