from math import inf

import pytest

from router.simulator.engine import Engine
from router.simulator.engine_model import MockerTiming, reference_engine
from router.simulator.engine_runs import Work
from router.simulator.traces import TraceRequest


def test_prompts_are_pooled_and_cached_context_is_free():
    timing = MockerTiming(capacity_tokens=100_000)
    pooled = 16.5e-3 + 1.58e-5 * 300 + 4.2e-10 * 300**2
    assert timing.step_s([(100, 0), (200, 9000)], 0, 0) == pytest.approx(pooled)
    decode = 5.75e-3 + 3.42e-8 * 5000
    assert timing.step_s([], 3, 5000) == pytest.approx(decode)
    assert timing.step_s([(300, 0)], 3, 5000) == pytest.approx(pooled + decode)
    assert timing.step_s([], 3, 5003) == pytest.approx(decode + timing.growth_s(3))


def test_an_engine_runs_on_it():
    timing = MockerTiming(capacity_tokens=100_000)
    engine = Engine(timing, 64, reports_growth=False)
    engine.submit(Work(0, "a", TraceRequest(0.0, 1000, 3, [])), 0.0)
    first_s = engine.due_s
    while engine.due_s < inf:
        last_s = engine.due_s
        engine.advance()
    assert first_s == pytest.approx(16.5e-3 + 15.8e-3 + 4.2e-4)
    assert last_s - first_s == pytest.approx(2 * 5.75e-3 + 3.42e-8 * (1001 + 1002))


def test_tiles_are_whole_and_attend_to_all_keys_up_to_their_own():
    """17 tokens after 63 are two tiles, the mean of whose last keys is 87: two groups."""
    timing = reference_engine()
    expected = 0.2e-3 + 2 * 1.04e-3 + 2 * 2 * 0.156e-3
    assert timing.step_s([(17, 63)], 0, 0) == pytest.approx(expected)
    assert timing.step_s([], 3, 640) == pytest.approx(0.2e-3 + 3 * 0.35e-3 + 10 * 0.156e-3)
    grown_s = timing.step_s([], 3, 704) - timing.step_s([], 3, 640)
    assert grown_s == pytest.approx(timing.growth_s(64))


def test_reference_engine_is_as_fast_as_measured():
    """Milliseconds of steps of 512 tokens after others, and of decoding requests."""
    timing = reference_engine()
    for context, measured_ms in ((0, 53), (512, 93), (1_536, 159), (3_584, 348)):
        assert timing.step_s([(512, context)], 0, 0) == pytest.approx(measured_ms / 1e3, rel=0.15)
    for requests, kv_tokens, measured_ms in ((1, 2_021, 6.3), (4, 8_075, 22.8), (32, 6_994, 32.7)):
        found_s = timing.step_s([], requests, kv_tokens)
        assert found_s == pytest.approx(measured_ms / 1e3, rel=0.2)
