"""Which blocks are worth a place in a slower tier, and whether they are worth loading."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import InvalidFieldError
from worker_agent.blocks.names import BlockName
from worker_agent.offload.load_or_recompute import LoadOrRecompute, TierSpeed
from worker_agent.offload.policies import (
    All,
    Frequency,
    MinPriorityPrefix,
    PassAll,
    Popularity,
    policy_of,
)
from worker_agent.offload.queue import StorePace, Waiting


def waiting(*numbers, priorities=None):
    return [
        Waiting(BlockName(number.to_bytes(16, "little"), number), priority, 0)
        for number, priority in zip(numbers, priorities or [0] * len(numbers), strict=True)
    ]


def admitted(policy, *numbers, now_s=0.0, priorities=None):
    those = policy.admitted(waiting(*numbers, priorities=priorities), now_s)
    return [each.name.sequence_hash for each in those]


def test_pass_all_policy_accepts_every_block():
    assert admitted(PassAll(), 1, 2) == [1, 2]


def test_the_second_sight_counts_until_the_first_is_forgotten():
    policy = Frequency(10, decay_s=600)
    assert admitted(policy, 1, 2) == []
    assert admitted(policy, 1, now_s=10) == [1]
    assert admitted(policy, 1, 2, now_s=599) == [1, 2]
    assert admitted(policy, 3, now_s=610) == []
    assert admitted(policy, 3, now_s=1300) == []  # its count of 1 is gone
    assert admitted(policy, 1, now_s=1300) == [1]  # its count of 4 is 2, and doubles


def test_sights_are_bounded():
    policy = Frequency(2)
    admitted(policy, 1, 2)
    admitted(policy, 1)
    admitted(policy, 3)  # 2 was not seen for the longest
    assert len(policy) == 2
    assert admitted(policy, 2) == []
    assert admitted(policy, 3) == [3]


def test_frequency_policy_accepts_frequent_blocks():
    policy = Popularity(64, min_count=2)
    for seen in ([1], [1, 2], [1, 2], [1, 2]):
        last = admitted(policy, *seen)
    assert last == [1, 2]
    assert admitted(policy, 3, 1) == [1]


@pytest.mark.parametrize(
    ("rule", "first", "second"),
    [("all", [1], [1]), ("frequency", [], [1]), ("popularity", [], [1])],
)
def test_policies_by_name(rule, first, second):
    policy = policy_of(rule, 64)
    assert (admitted(policy, 1), admitted(policy, 1)) == (first, second)


def test_blocks_after_a_gap_are_not_loaded():
    assert admitted(MinPriorityPrefix(5), 1, 2, 3, priorities=[7, 4, 9]) == [1]
    assert admitted(MinPriorityPrefix(0), 1, 2) == [1, 2]


def test_several_policies_agree():
    policy = All([MinPriorityPrefix(5), Frequency(10)])
    assert admitted(policy, 1, 2, priorities=[7, 4]) == []
    assert admitted(policy, 1, 2, priorities=[7, 4]) == [1]


# ── Loading, or computing ────────────────────────────────────────────────────────────────────────

BLOCK_BYTES = 1_000_000


def speeds(bandwidth=1e9, latency_s=0.001, prefill_tokens_per_s=16_000.0):
    speed, worth = TierSpeed(BLOCK_BYTES), LoadOrRecompute(16)
    speed.note(100, latency_s, 100 * BLOCK_BYTES / bandwidth)
    worth.note_prefill(1000, 1000 / prefill_tokens_per_s)
    return speed, worth


def test_load_or_recompute_takes_the_sooner():
    speed, worth = speeds()  # a block loads in 1 ms, after 1 ms, and is computed in 1 ms
    assert speed.load_s(10) == pytest.approx(0.011)
    assert worth.recompute_s(10) == pytest.approx(0.010)
    assert worth.blocks_to_load(speed, 10) == 0
    fast, worth = speeds(bandwidth=2e9)
    assert worth.blocks_to_load(fast, 10) == 10
    assert worth.blocks_to_load(fast, 1) == 0
    fast.queued_bytes = 20 * BLOCK_BYTES
    assert worth.blocks_to_load(fast, 10) == 0


def test_an_unmeasured_tier_is_tried():
    assert LoadOrRecompute(16).blocks_to_load(TierSpeed(BLOCK_BYTES), 7, deadline_s=0.0) == 7
    slow, _ = speeds(bandwidth=1.0)
    assert LoadOrRecompute(16).blocks_to_load(slow, 7) == 7


@given(st.integers(0, 200), st.floats(0, 0.2))
def test_load_is_cut_at_the_deadline(blocks, deadline_s):
    speed, worth = speeds(bandwidth=1e10)
    in_time = [count for count in range(blocks + 1) if speed.load_s(count) <= deadline_s]
    is_worth_it = speed.load_s(blocks) < worth.recompute_s(blocks)
    expected = max(in_time, default=0) if is_worth_it else 0
    assert worth.blocks_to_load(speed, blocks, deadline_s) == expected


def test_averages_forget():
    speed, _ = speeds(bandwidth=1e9, latency_s=0.0)
    for _ in range(60):
        speed.note(10, 0.0, 10 * BLOCK_BYTES / 2e9)
    assert speed.load_s(100) == pytest.approx(0.05, rel=0.01)
    with pytest.raises(InvalidFieldError, match="block_bytes: 0"):
        TierSpeed(0)


# ── Pace ─────────────────────────────────────────────────────────────────────────────────────────


def take(pace, wanted_blocks, now_s, *, load=False, decode=False):
    return pace.take(wanted_blocks, now_s, is_load_waiting=load, is_decoding=decode)


def test_stores_yield():
    pace = StorePace(1000.0, 500)
    assert take(pace, 400, 0.0) == 400
    assert take(pace, 400, 0.0) == 100
    assert take(pace, 400, 0.2, load=True) == 0
    assert take(pace, 400, 0.2) == 200
    assert take(pace, 400, 1.2, decode=True) == 100
    assert take(pace, 9000, 60.0) == 500
    assert pace.wait_s() == pytest.approx(0.001)
    assert take(pace, 1, 60.0, decode=True) == 0
    assert pace.wait_s() == pytest.approx(0.01)


@pytest.mark.parametrize(("rate", "burst", "field"), [(0, 1, "blocks_per_s"), (1, 0, "burst")])
def test_a_pace_is_above_nothing(rate, burst, field):
    with pytest.raises(InvalidFieldError, match=field):
        StorePace(rate, burst)
