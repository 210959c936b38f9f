"""What a rank is busy with, point by point as the anchor counts it."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.protocol.values import Rank
from router.sequence.active.footprint import Footprint
from router.sequence.active.tracker import Tracker
from router.sequence.rank_table import (
    COMPLETED_TOKENS,
    DECODE_BLOCKS,
    DECODING_KV_TOKENS,
    DECODING_REQUESTS,
    HEAD_CONTEXTS,
    HEAD_SINCE_S,
    HEAD_TOKENS,
    PREFILL_S,
    PREFILL_TOKENS,
    QUEUED_CONTEXTS,
    QUEUED_TOKENS,
    REQUESTS,
    RankTable,
)
from support.chaos.fuzzing import examples

A = Rank(1, 0)


def footprint(path, own_blocks=0, prefill_tokens=0, cached_tokens=0, expected_tokens=None):
    """A prompt whose blocks are named by the paths that lead to them."""
    hashes = [hash(tuple(path[: i + 1])) & (2**64 - 1) for i in range(len(path))]
    isl_tokens = prefill_tokens + cached_tokens
    return Footprint(
        np.array(hashes, np.uint64), own_blocks, isl_tokens, cached_tokens, 16, expected_tokens
    )


class RankUnderTest:
    """A tracker with one rank, whose columns are read by name."""

    def __init__(self):
        self.table = RankTable()
        self.table.add(A)
        self.tracker = Tracker(1e9, self.table)

    def add(self, request_id, prompt, now_s):
        self.tracker.book(request_id, A, prompt, now_s)

    def prefill_complete(self, request_id, now_s):
        self.tracker.prefill_complete(request_id, now_s)

    def add_output_blocks(self, request_id, blocks, decay_fraction=None, now_s=9.0):
        self.tracker.add_output_blocks(request_id, blocks, decay_fraction, now_s)

    def free(self, request_id, now_s):
        self.tracker.free(request_id, now_s)

    def end_overdue(self, now_s, tokens_per_s):
        """End the prompts that an engine of this rate should have computed."""
        self.table.row(A)[PREFILL_S] = 1 / tokens_per_s
        self.tracker.end_overdue(now_s)
        self.table.row(A)[PREFILL_S] = 0.0

    def progress(self, request_id):
        return self.tracker.shared(request_id).progress

    @property
    def head(self):
        return tuple(self.table.row(A)[[HEAD_TOKENS, HEAD_CONTEXTS, HEAD_SINCE_S]])

    active_blocks = property(lambda self: self.table.row(A)[DECODE_BLOCKS])
    active_requests = property(lambda self: self.table.row(A)[REQUESTS])
    active_prefill_tokens = property(lambda self: self.table.row(A)[PREFILL_TOKENS])
    decoding_requests = property(lambda self: self.table.row(A)[DECODING_REQUESTS])
    decoding_kv_tokens = property(lambda self: self.table.row(A)[DECODING_KV_TOKENS])
    queued_tokens = property(lambda self: self.table.row(A)[QUEUED_TOKENS])
    queued_contexts = property(lambda self: self.table.row(A)[QUEUED_CONTEXTS])


def idle():
    return RankUnderTest()


def busy(*requests):
    active = idle()
    for request_id, path, own_blocks, prefill_tokens in requests:
        active.add(request_id, footprint(path, own_blocks, prefill_tokens), 0.0)
    return active


def test_shared_blocks_count_once():
    active = busy(("a", [1, 2, 3], 0, 0), ("b", [1, 2, 4], 0, 0))
    assert active.active_blocks == 4


def test_incomplete_blocks_are_not_shared():
    active = busy(("a", [1], 1, 0), ("b", [1], 1, 0))
    assert active.active_blocks == 3


def test_prefill_is_counted_until_it_is_complete():
    active = busy(("a", [1], 0, 100), ("b", [2], 0, 50))
    assert active.active_prefill_tokens == 150
    active.prefill_complete("a", 1.0)
    active.prefill_complete("a", 1.0)
    assert active.active_prefill_tokens == 50


def test_freeing_implies_that_prefill_is_over():
    active = busy(("a", [1, 2], 0, 100))
    active.free("a", 1.0)
    assert (active.active_blocks, active.active_prefill_tokens, active.active_requests) == (0, 0, 0)


def test_a_shared_block_goes_with_its_last_request():
    active = busy(("a", [1, 2], 0, 0), ("b", [1, 3], 0, 0))
    active.free("a", 1.0)
    assert active.active_blocks == 2


def test_the_oldest_prompt_that_is_not_complete_is_the_head():
    active = idle()
    active.add("a", footprint([1], 0, 100), 3.0)
    active.add("b", footprint([2], 0, 50), 4.0)
    active.add("c", footprint([3], 0, 20), 5.0)
    assert active.head == (100, 100**2 / 2, 3.0)
    active.prefill_complete("b", 6.0)
    assert active.head == (100, 100**2 / 2, 3.0)
    active.prefill_complete("a", 7.0)
    assert active.head == (20, 20**2 / 2, 7.0)
    active.free("c", 8.0)
    assert active.head == (0, 0, 0)
    active.add("d", footprint([4], 0, 30), 9.0)
    assert active.head == (30, 30**2 / 2, 9.0)


def test_attention_work_grows_with_what_is_cached_before_it():
    active = idle()
    active.add("a", footprint([1], 0, 100, cached_tokens=1000), 0.0)
    assert active.queued_contexts == 100 * (1000 + 50)
    active.prefill_complete("a", 1.0)
    assert active.queued_contexts == 0


def test_decoding_requests_hold_their_prompt_and_their_output():
    active = idle()
    active.add("a", footprint([1], 0, 100, cached_tokens=60), 0.0)
    active.add_output_blocks("a", 1)
    assert (active.decoding_requests, active.decoding_kv_tokens) == (0, 0)
    active.prefill_complete("a", 1.0)
    active.add_output_blocks("a", 1)
    assert (active.decoding_requests, active.decoding_kv_tokens) == (1, 160 + 2 * 16)
    active.free("a", 2.0)
    assert (active.decoding_requests, active.decoding_kv_tokens) == (0, 0)


def test_predicted_completion_leaves_the_queue_and_counts_until_reported():
    """At 100 tokens a second, `a` ends at 4.0; `b`, booked after that, at 6.5."""
    active = idle()
    active.add("a", footprint([1], 0, 100, cached_tokens=60), 3.0)
    active.add("b", footprint([2], 0, 50), 6.0)
    active.end_overdue(6.4, 100)
    assert (active.active_prefill_tokens, active.queued_tokens) == (150, 50)
    assert (active.decoding_requests, active.decoding_kv_tokens) == (1, 160)
    assert active.head == (50, 50**2 / 2, 6.0)
    assert not active.progress("a").is_prefill_complete
    active.prefill_complete("a", 6.4)
    active.end_overdue(6.5, 100)
    assert (active.active_prefill_tokens, active.queued_tokens) == (50, 0)
    active.free("b", 7.0)
    assert (active.active_prefill_tokens, active.decoding_kv_tokens) == (0, 160)


def test_output_blocks_add_up():
    active = busy(("a", [1, 2], 1, 0))
    active.add_output_blocks("a", 1)
    active.add_output_blocks("a", 1)
    assert active.active_blocks == 5


def test_decay_weighs_what_only_this_request_holds():
    """The anchor: 4 prompt blocks and 1 output block at 0.5 are 3 blocks, halves rounded up."""
    active = busy(("a", [1, 2, 3, 4], 0, 0))
    active.add_output_blocks("a", 1, 0.5)
    assert active.active_blocks == 3


def test_decay_leaves_shared_blocks_alone():
    active = busy(("a", [1, 2, 3, 4], 0, 0), ("b", [1, 2], 0, 0))
    active.add_output_blocks("a", 1, 0.0)
    assert active.active_blocks == 2


def test_a_decayed_block_that_becomes_shared_weighs_in_full():
    active = busy(("a", [1, 2], 0, 0))
    active.add_output_blocks("a", 1, 0.0)
    assert active.active_blocks == 0
    active.add("b", footprint([1, 2]), 1.0)
    assert active.active_blocks == 2


def test_a_later_output_block_without_decay_weighs_in_full():
    active = busy(("a", [], 0, 0))
    active.add_output_blocks("a", 1, 0.0)
    active.add_output_blocks("a", 1)
    assert active.active_blocks == 1


def test_decay_is_what_is_still_to_come_of_the_expected_output():
    """max(0, 1 − generated / expected): after 2 of 4 blocks a half, beyond all of them nothing."""
    active = idle()
    active.add("a", footprint([1, 2, 3, 4], expected_tokens=64), 0.0)
    weights = []
    for _ in range(5):
        active.add_output_blocks("a", 1)
        weights.append(active.progress("a").decay_fraction)
    assert weights == [0.75, 0.5, 0.25, 0.0, 0.0]
    assert active.active_blocks == 0


def test_reported_fraction_overrides_the_expected_one():
    active = idle()
    active.add("a", footprint([1, 2, 3, 4], expected_tokens=64), 0.0)
    active.add_output_blocks("a", 1, 1.0)
    assert active.active_blocks == 5


def test_without_an_expected_output_nothing_decays_by_itself():
    active = busy(("a", [1, 2, 3, 4], 0, 0))
    active.add_output_blocks("a", 1)
    assert (active.active_blocks, active.progress("a").decay_fraction) == (5, None)


IDS = st.sampled_from("abcd")


class Consistent(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.active, self.now_s, self.ids = idle(), 0.0, []

    @rule(request_id=IDS, prompt=st.integers(0, 2), length=st.integers(0, 4),
          own=st.integers(0, 1), tokens=st.integers(0, 99))  # fmt: skip
    def add(self, request_id, prompt, length, own, tokens):
        if request_id not in self.ids:
            path = [0, *range(10 * prompt, 10 * prompt + 4)][:length]
            self.active.add(request_id, footprint(path, own, tokens), self.now_s)
            self.ids.append(request_id)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), fraction=st.none() | st.floats(0, 1))
    def grow(self, data, fraction):
        request_id = data.draw(st.sampled_from(self.ids))
        self.active.add_output_blocks(request_id, 1, fraction, self.now_s)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def complete(self, data):
        self.active.prefill_complete(data.draw(st.sampled_from(self.ids)), self.now_s)

    @rule(seconds=st.floats(0.0, 2.0))
    def pass_time(self, seconds):
        self.now_s += seconds
        self.active.end_overdue(self.now_s, 50)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def free(self, data):
        request_id = data.draw(st.sampled_from(self.ids))
        self.ids.remove(request_id)
        self.active.free(request_id, self.now_s)
        if not self.ids:
            assert not self.active.table.row(A)[:COMPLETED_TOKENS].any()

    @invariant()
    def holds(self):
        self.active.tracker.check_invariants()
        assert self.active.active_requests == len(self.ids)


Consistent.TestCase.settings = settings(max_examples=examples(20))
TestConsistent = Consistent.TestCase
