"""A simulated engine, as vLLM's metrics show it."""

import pytest

from router.publisher.engine_metrics.metrics import EngineMetrics
from router.simulator.engine import Engine
from router.simulator.engine_model import llama_70b
from router.simulator.engine_runs import Work
from router.simulator.traces import TraceRequest
from router.simulator.vllm_metrics import vllm_metrics

BLOCK_SIZE = 16


def engine_with(*lengths):
    engine = Engine(llama_70b(), BLOCK_SIZE, reports_growth=False)
    for number, (isl, osl) in enumerate(lengths):
        engine.submit(Work(number, str(number), TraceRequest(0.0, isl, osl, [])), 0.0)
    return engine


def seen(engine, now_s):
    metrics = EngineMetrics("vllm", vllm_metrics(engine, BLOCK_SIZE, now_s))
    return metrics.load(0, metrics.facts())


def test_a_prompt_counts_at_its_first_token_and_was_admitted_before():
    engine = engine_with((5_000, 3))  # three chunks of up to 2,048 tokens
    assert seen(engine, 0.0).gauges.running_requests == 0
    first_s = engine.due_s
    engine.advance()
    load = seen(engine, first_s)
    assert load.gauges.running_requests == 1
    assert (load.seen.prompt_tokens, load.seen.admitted_tokens) == (0, 5_000)
    assert load.seen.steps == 0  # which gave no output
    engine.advance()
    end_s = engine.due_s
    engine.advance()
    load = seen(engine, end_s)
    assert (load.seen.prompt_tokens, load.seen.steps, load.seen.outputs) == (5_000, 1, 0)
    while engine.due_s < float("inf"):
        now_s = engine.due_s
        engine.advance()
    load = seen(engine, now_s)
    assert (load.seen.steps, load.seen.outputs, load.counters.decode_requests) == (3, 2, 3)
    assert load.seen.outputs_s == pytest.approx(now_s - end_s)
    assert load.seen.finished_s == pytest.approx(end_s)
    assert (load.seen.finished, load.seen.finished_tokens) == (1, 5_000)
    assert not load.seen.is_working


def test_cached_tokens_of_a_prompt_count_at_its_first_token():
    engine = Engine(llama_70b(), BLOCK_SIZE, reports_growth=False)
    for number in range(2):
        prompt = TraceRequest(0.0, 164, 1, list(range(10)))
        engine.submit(Work(number, str(number), prompt), float(number))
        load = seen(engine, engine.due_s)
        assert load.counters.cached_tokens == 0
        now_s = engine.due_s
        engine.advance()
    load = seen(engine, now_s)
    assert (load.counters.prefill_tokens, load.counters.cached_tokens) == (164 + 4, 160)


def test_steps_under_way_are_counted_one_by_one():
    engine = engine_with((100, 50))
    engine.advance()  # what follows is one run of 49 steps
    load = seen(engine, engine.due_s - 10 * llama_70b().step_s([], 1, 150))
    assert load.seen.steps in (39, 40)
    assert load.seen.outputs == load.seen.steps - 1
    assert load.seen.outputs_s == pytest.approx(load.seen.outputs * 0.02015, rel=0.01)
