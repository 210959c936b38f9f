"""When a rank is too busy, and when no longer."""

import numpy as np
import pytest

from router.scheduler.busy import NO_THRESHOLDS, BusyThresholds, busy_ranks
from router.sequence import rank_table as ranks


def row(decode=0.0, prefill=0.0, capacity=100.0, batched=1000.0, was_busy=False, used=0.0):
    made = np.zeros(ranks.RANK_COLUMNS)
    made[[ranks.DECODE_BLOCKS, ranks.USED_BLOCKS, ranks.CAPACITY_BLOCKS]] = decode, used, capacity
    made[[ranks.PREFILL_TOKENS, ranks.MAX_BATCHED_TOKENS]] = prefill, batched
    made[ranks.BUSY] = was_busy
    return made


def busy_of(rows, thresholds, hysteresis=0.1, *, is_latched=False):
    slots = np.arange(len(rows))
    busy, count = busy_ranks(rows, slots, thresholds, hysteresis, is_latched=is_latched)
    assert count == busy.sum()
    return busy.tolist()


def is_busy(thresholds, *, hysteresis=0.1, **measures):
    return busy_of(np.array([row(**measures)]), thresholds, hysteresis) == [True]


DECODE = BusyThresholds(active_decode_blocks_threshold=0.8)
TOKENS = BusyThresholds(active_prefill_tokens_threshold=500)
STEPS = BusyThresholds(active_prefill_tokens_threshold_frac=2.0)


@pytest.mark.parametrize(
    ("thresholds", "at", "above", "in_band", "below"),
    [
        (DECODE, {"decode": 80}, {"decode": 81}, {"decode": 73}, {"decode": 72}),
        (TOKENS, {"prefill": 500}, {"prefill": 501}, {"prefill": 451}, {"prefill": 450}),
        (STEPS, {"prefill": 2000}, {"prefill": 2001}, {"prefill": 1801}, {"prefill": 1800}),
    ],
)
def test_busy_above_the_threshold_free_below_the_band(thresholds, at, above, in_band, below):
    for measures, fresh, latched in [
        (at, False, True),
        (above, True, True),
        (in_band, False, True),
        (below, False, False),
    ]:
        assert is_busy(thresholds, **measures) is fresh
        assert is_busy(thresholds, was_busy=True, **measures) is latched


def test_without_a_band_a_rank_is_free_at_the_threshold():
    assert not is_busy(TOKENS, was_busy=True, hysteresis=0.0, prefill=500)


def test_one_measure_is_enough_and_all_have_to_fall():
    both = BusyThresholds(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=10)
    assert is_busy(both, decode=51)
    assert is_busy(both, prefill=11)
    assert is_busy(both, was_busy=True, decode=46, prefill=0)
    assert not is_busy(both, was_busy=True, decode=45, prefill=9)


def test_zero_threshold_is_busy_at_any_load():
    zero = BusyThresholds(active_prefill_tokens_threshold=0)
    assert is_busy(zero, prefill=1)
    assert not is_busy(zero, was_busy=True, prefill=0)


def test_without_thresholds_no_rank_is_busy():
    assert not is_busy(NO_THRESHOLDS, was_busy=True, decode=1e9, prefill=1e9)


def test_each_rank_is_judged_by_itself():
    rows = np.array([row(90.0), row(90.0, capacity=200.0), row(10.0), row(used=90.0)])
    assert busy_of(rows, DECODE) == [True, False, False, True]


def test_unknown_capacity_is_no_limit():
    assert not is_busy(DECODE, decode=1e9, capacity=0.0)
    assert not is_busy(STEPS, prefill=19_000_000.0, batched=0.0)


def test_busy_state_is_kept_only_when_latched():
    rows = np.array([row(prefill=501), row(prefill=499)])
    busy_of(rows, TOKENS)
    assert rows[:, ranks.BUSY].tolist() == [0, 0]
    busy_of(rows, TOKENS, is_latched=True)
    rows[:, ranks.PREFILL_TOKENS] = 470
    assert busy_of(rows, TOKENS, is_latched=True) == [True, False]
