"""Steps that last longer than their engine's model says."""

from math import inf, log
from random import Random
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.simulator.disturbances import CALM, HELD_STEPS, Disturbances, StepLoad, StepTimes
from router.simulator.engine import Engine
from router.simulator.engine_model import EngineModel
from router.simulator.engine_runs import Work
from router.simulator.traces import TraceRequest
from support.chaos.fuzzing import examples

MODEL = EngineModel(
    chunk_tokens=64,
    base_s=0.02,
    prefill_token_s=0.001,
    attention_token2_s=0.0,
    decode_request_s=0.001,
    decode_kv_token_s=1e-5,
    capacity_tokens=8_000,
)
DECODING = StepLoad([], 4, 1_000, 4)
DECODE_S = 0.02 + 4 * 0.001 + 1_000 * 1e-5


def times(seed=1, **fields):
    return StepTimes(MODEL, Disturbances(**fields), Random(seed))


def step_durations(steps, **fields):
    """Durations of single decode steps of one load, one after the other."""
    each, now_s, durations = times(**fields), 0.0, []
    for step in range(steps):
        durations.append(each.planned(DECODING, 1, step, now_s).first_step_s)
        now_s += durations[-1]
    return durations


def test_calm_steps_are_those_of_the_model():
    planned = times().planned(DECODING, 100, 0, 0.0)
    assert planned == (100, pytest.approx(DECODE_S), pytest.approx(4e-5))
    assert not CALM.stretches_steps


def test_noise_has_its_deviation_and_is_right_on_average():
    factors = [duration / DECODE_S for duration in step_durations(4_000, noise=0.3)]
    assert fmean(factors) == pytest.approx(1.0, rel=0.02)
    assert stdev(map(log, factors)) == pytest.approx(0.3, rel=0.05)


def test_noise_is_held_for_a_few_steps():
    assert times(noise=0.3).planned(DECODING, 100, 0, 0.0).steps == HELD_STEPS
    assert times(noise=0.3).planned(DECODING, 3, 0, 0.0).steps == 3


def test_stragglers_have_their_share_and_their_length():
    durations = step_durations(20_000, straggling=0.01, straggler_factor=20.0)
    slow = [duration for duration in durations if duration > 2 * DECODE_S]
    assert len(slow) == pytest.approx(200, rel=0.25)
    assert slow == [pytest.approx(20 * DECODE_S)] * len(slow)


@given(st.integers(0, 2**32), st.integers(1, 40))
@settings(max_examples=examples(30))
def test_runs_have_the_same_stragglers_as_single_steps(seed, steps):
    """A run ends before a straggler, which is a run of its own."""
    single, in_runs = (times(seed, straggling=0.05, straggler_factor=5.0) for _ in range(2))
    expected = [single.planned(DECODING, 1, step, 0.0).first_step_s for step in range(300)]
    found, step = [], 0
    while step < 300:
        planned = in_runs.planned(DECODING, min(steps, 300 - step), step, 0.0)
        found += [planned.first_step_s] * planned.steps
        step += planned.steps
    assert found == expected


def test_pauses_take_their_part_of_the_time():
    durations = step_durations(20_000, pause_interval_s=10.0, pause_s=2.0)
    paused_s = sum(durations) - 20_000 * DECODE_S
    assert paused_s / sum(durations) == pytest.approx(2 / 12, rel=0.2)
    assert max(durations) < 2.0 + 2 * DECODE_S


def test_pause_of_an_idle_engine_is_over():
    each = times(pause_interval_s=10.0, pause_s=2.0)
    each.planned(DECODING, 1, 0, 0.0)
    late = [each.planned(DECODING, 1, step, 1e4 * step).first_step_s for step in range(1, 50)]
    assert sum(duration > DECODE_S + 1e-9 for duration in late) < 20


def test_first_step_and_each_new_shape_are_compiled():
    each = times(start_s=20.0, shape_s=2.0)
    prompt = StepLoad([(60, 0)], 0, 0, 0)
    longer = StepLoad([(30, 0), (34, 0)], 0, 0, 0)
    delays = [
        each.planned(load, 10, 0, 0.0).first_step_s - MODEL.step_s(load.chunks, load.requests, 0)
        for load in (prompt, longer, StepLoad([(8, 0)], 0, 0, 0), StepLoad([], 8, 0, 8), prompt)
    ]
    assert delays == [pytest.approx(d, abs=1e-9) for d in (22.0, 0.0, 2.0, 2.0, 0.0)]


def test_drafted_tokens_take_room_and_time_and_some_are_accepted():
    each = times(draft_tokens=3, draft_s=0.004)
    assert each.room_tokens(4) == 64 - 4 * 4
    planned = each.planned(StepLoad([], 4, 1_000, 10), 100, 0, 0.0)
    assert planned.first_step_s == pytest.approx(0.02 + 16 * 0.001 + 0.01 + 0.004)
    assert planned.growth_s == pytest.approx(10 * 1e-5)
    drawn = [each.tokens_a_step() for _ in range(400)]
    assert set(drawn) == {1, 2, 3, 4}
    assert fmean(drawn) == pytest.approx(2.5, rel=0.1)


def test_the_same_seed_gives_the_same_steps():
    fields = {"noise": 0.3, "straggling": 0.02, "straggler_factor": 9.0}
    assert step_durations(200, seed=3, **fields) == step_durations(200, seed=3, **fields)
    assert step_durations(200, seed=3, **fields) != step_durations(200, seed=4, **fields)


def test_busy_time_contains_what_disturbs_steps():
    engine = Engine(MODEL, 8, disturbances=Disturbances(start_s=20.0))
    engine.submit(Work(0, "a", TraceRequest(0.0, 16, 3, [])), 0.0)
    while engine.due_s < inf:
        now_s = engine.due_s
        engine.advance()
    assert engine.counters(now_s).busy_s == pytest.approx(now_s)
    assert now_s > 20.0
