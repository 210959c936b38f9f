"""Work with a known duration, from what an engine counts."""

import pytest
from msgspec.structs import replace

from router.protocol.loads import LoadCounters
from router.publisher.engine_metrics.loads import EngineLoad, WorkSeen
from router.publisher.engine_metrics.rate_windows import (
    CLEAR,
    ENDED,
    FELT,
    WALL,
    RateEstimator,
    RateWindows,
)

SECOND = WorkSeen(
    steps=40, prompt_tokens=1_000, admitted_tokens=1_000, outputs=160, outputs_s=4.0, finished=2
)
"""What a busy engine with four decoding requests counts in a second, after the first."""


def plus(seen, times=1, **changes):
    counted = {
        name: getattr(seen, name) + times * getattr(SECOND, name)
        for name in ("steps", "prompt_tokens", "admitted_tokens", "outputs", "outputs_s")
    }
    return replace(seen, is_working=True, used_tokens=5_000, **{**counted, **changes})


def polled(windows, polls, seen=None, **changes):
    """Poll each second; returns the last state."""
    seen = seen or WorkSeen(is_working=True, used_tokens=5_000)
    for at_s in range(polls):
        windows.take(seen, float(at_s))
        seen = plus(seen, **changes)
    return seen


def warm():
    return RateWindows(is_warm=True)


def works(windows):
    return [each.work for each in windows.timed]


def test_five_busy_seconds_are_a_window():
    windows = warm()
    polled(windows, 6)
    assert works(windows)[CLEAR] == LoadCounters(
        steps=200,
        busy_s=5.0,
        prefill_tokens=5_000,
        decode_requests=800,
        resident_kv_tokens=1_000_000,
    )
    assert works(windows)[FELT] == LoadCounters()


def test_windows_add_up():
    windows = warm()
    polled(windows, 16)
    assert works(windows)[CLEAR].busy_s == 15.0
    assert works(windows)[CLEAR].steps == 600


def underway(seen, tokens):
    return replace(seen, admitted_tokens=seen.admitted_tokens + tokens)


def test_a_window_waits_for_its_prompts():
    windows = warm()
    seen = polled(windows, 5)
    windows.take(underway(seen, 3_000), 5.0)
    assert works(windows)[CLEAR] == LoadCounters()
    windows.take(plus(seen), 6.0)
    assert works(windows)[CLEAR].prefill_tokens == 6_000
    assert works(windows)[CLEAR].busy_s == 6.0


def test_a_window_begins_without_prompts_if_it_can():
    windows, seen = warm(), WorkSeen(is_working=True)
    windows.take(underway(seen, 3_000), 0.0)
    for second in range(1, 7):
        seen = plus(seen)
        windows.take(seen, float(second))
    assert works(windows)[CLEAR].busy_s == 5.0
    assert works(windows)[CLEAR].prefill_tokens == 5_000


def test_half_of_a_prompt_in_work_belongs_to_a_window_that_never_is_without():
    windows, seen = warm(), WorkSeen(is_working=True)
    for second in range(11):
        windows.take(underway(seen, 5_000 if second == 10 else 1_000), float(second))
        seen = plus(seen)
    assert works(windows)[WALL].prefill_tokens == 12_000
    assert works(windows)[WALL].busy_s == 10.0
    assert works(windows)[CLEAR] == LoadCounters()


def test_a_window_amid_a_prompt_longer_than_itself_is_not_used():
    windows, seen = warm(), WorkSeen(is_working=True)
    for second in range(31):
        windows.take(underway(seen, 100_000), float(second))
        seen = plus(seen)
    assert works(windows)[WALL] == LoadCounters()


def test_tokens_of_aborted_prompts_do_not_count_as_work():
    windows = warm()
    windows.take(WorkSeen(admitted_tokens=5_000), 0.0)  # idle
    seen = WorkSeen(admitted_tokens=5_000, is_working=True)
    for second in range(1, 7):
        windows.take(seen, float(second))
        seen = plus(seen)
    assert works(windows)[CLEAR].busy_s == 5.0


@pytest.mark.parametrize("at_s", [1, 3, 5])
def test_a_window_without_work_at_a_poll_does_not_count(at_s):
    windows, seen = warm(), WorkSeen(is_working=True)
    for second in range(6):
        windows.take(replace(seen, is_working=second != at_s), float(second))
        seen = plus(seen)
    assert works(windows)[CLEAR] == LoadCounters()


def test_an_engine_that_was_idle_between_polls_is_not_timed_by_the_clock():
    windows = warm()
    polled(windows, 6, outputs_s=0.0)
    assert works(windows)[CLEAR] == LoadCounters()


def test_outputs_time_steps_where_no_prompt_was():
    windows, seen = warm(), WorkSeen(is_working=True)
    for second in range(6):
        windows.take(seen, float(second))
        outputs_s = seen.outputs_s + 2.0
        seen = plus(seen, prompt_tokens=0, admitted_tokens=0, outputs_s=outputs_s)
    felt = works(windows)[FELT]
    assert (felt.steps, felt.decode_requests) == (200, 800)
    assert felt.busy_s == pytest.approx(200 * 10.0 / 800)


def test_preempted_work_is_not_timed():
    windows = warm()
    seen = polled(windows, 3)
    polled(windows, 3)
    windows.take(plus(seen, preemptions=1), 3.0)
    windows.take(plus(seen, 3, preemptions=1), 5.0)
    assert works(windows)[CLEAR] == LoadCounters()


def test_a_gap_between_polls_ends_a_window():
    windows = warm()
    seen = polled(windows, 3)
    windows.take(plus(seen, 2), 5.0)
    assert works(windows)[CLEAR] == LoadCounters()


def test_the_first_two_seconds_of_work_do_not_count():
    cold = RateWindows(is_warm=False)
    polled(cold, 8)
    assert works(cold)[CLEAR] == LoadCounters()
    cold = RateWindows(is_warm=False)
    polled(cold, 9)
    assert works(cold)[CLEAR].busy_s == 5.0


def ended(seen, requests, tokens, seconds):
    return replace(
        seen,
        finished=seen.finished + requests,
        finished_tokens=seen.finished_tokens + tokens,
        finished_s=seen.finished_s + seconds,
    )


def test_prompts_that_ended_are_a_first_guess():
    windows, seen = warm(), WorkSeen()
    windows.take(seen, 0.0)
    windows.take(ended(seen, 2, 3_000, 0.25), 1.0)
    found = works(windows)[ENDED]
    assert (found.steps, found.prefill_tokens, found.busy_s) == (2, 3_000, 0.25)


def test_prompts_computed_together_are_no_guess():
    windows, seen = warm(), WorkSeen()
    windows.take(seen, 0.0)
    windows.take(ended(seen, 2, 3_000, 0.6), 1.0)
    assert works(windows)[ENDED] == LoadCounters()


def test_guesses_end_with_windows():
    windows = warm()
    seen = polled(windows, 5 * 8 + 1)
    windows.take(ended(seen, 2, 3_000, 0.1), 41.0)
    assert works(windows)[ENDED] == LoadCounters()


def test_context_is_taken_over_as_requests_double():
    """A mean that changed with every window would look like a measured one."""
    windows, seen = warm(), WorkSeen(is_working=True, finished=100, context_tokens=500.0)
    for second in range(6):
        windows.take(seen, float(second))
        seen = plus(seen, context_tokens=seen.context_tokens + 100.0)
    assert works(windows)[CLEAR].prefill_token_contexts == 5_000 * 500.0


def load(steps=0, finished=0, **fields):
    counters = LoadCounters(steps=steps, requests_finished=finished)
    return EngineLoad(counters=counters, seen=WorkSeen(**fields))


def test_a_fallen_counter_is_a_new_life():
    estimator = RateEstimator()
    lives = [estimator.take(load(steps), 0.0, 0.0) and estimator.life for steps in (5, 9, 3, 4)]
    assert lives == [1, 1, 2, 2]


def test_another_start_is_a_new_life():
    estimator = RateEstimator()
    for started_s, life in ((1.0, 1), (1.0, 1), (None, 1), (2.0, 1), (3.0, 2)):
        estimator.take(load(), 0.0, 0.0, started_s)
        assert estimator.life == life


def test_slow_polls_tell_no_rates():
    busy, estimator, seen = 6, RateEstimator(), WorkSeen(is_working=True)
    for second in range(busy):
        took_s = 0.31 if second == busy - 1 else 0.01
        told = estimator.take(
            EngineLoad(counters=LoadCounters(requests_finished=8), seen=seen), second, took_s
        )
        seen = plus(seen)
    assert told.timed[CLEAR].work == LoadCounters()
    assert estimator.take(told, busy, 0.01).timed == told.timed


def test_an_engine_that_finished_requests_is_warm():
    for finished, busy_s in ((8, 5.0), (7, 0.0)):
        estimator, seen = RateEstimator(), WorkSeen(is_working=True)
        for second in range(6):
            counters = LoadCounters(requests_finished=finished)
            told = estimator.take(EngineLoad(counters=counters, seen=seen), second, 0.01)
            seen = plus(seen)
        assert told.timed[CLEAR].work.busy_s == busy_s
