from math import inf

import pytest

from router.simulator.engine import Engine, Work
from router.simulator.engine_model import MockerTiming
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
