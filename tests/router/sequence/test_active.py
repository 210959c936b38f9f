"""What a rank is busy with, point by point as the anchor counts it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.sequence.active import ActiveSequences


def busy(*requests):
    active = ActiveSequences()
    for request_id, hashes, own_blocks, prefill_tokens in requests:
        active.add(request_id, hashes, own_blocks, prefill_tokens)
    return active


def test_shared_blocks_count_once():
    active = busy(("a", [1, 2, 3], 0, 0), ("b", [1, 2, 4], 0, 0))
    assert active.active_blocks == 4


def test_incomplete_blocks_are_nobodys_to_share():
    active = busy(("a", [1], 1, 0), ("b", [1], 1, 0))
    assert active.active_blocks == 3


def test_new_blocks_are_those_behind_the_active_prefix():
    active = busy(("a", [1, 2, 3], 0, 0))
    assert active.new_blocks([1, 2, 9, 10], 1) == 3
    assert active.new_blocks([1, 2], 0) == 0
    assert active.new_blocks([], 1) == 1


def test_prefill_is_counted_until_it_is_complete():
    active = busy(("a", [1], 0, 100), ("b", [2], 0, 50))
    assert active.active_prefill_tokens == 150
    active.prefill_complete("a")
    active.prefill_complete("a")
    assert active.active_prefill_tokens == 50


def test_freeing_implies_that_prefill_is_over():
    active = busy(("a", [1, 2], 0, 100))
    active.free("a")
    assert (active.active_blocks, active.active_prefill_tokens, active.active_requests) == (0, 0, 0)


def test_a_shared_block_goes_with_its_last_request():
    active = busy(("a", [1, 2], 0, 0), ("b", [1, 3], 0, 0))
    active.free("a")
    assert active.active_blocks == 2


def test_output_blocks_add_up():
    active = busy(("a", [1, 2], 1, 0))
    active.add_output_block("a")
    active.add_output_block("a")
    assert active.active_blocks == 5


def test_decay_weighs_what_only_this_request_holds():
    """The anchor: 4 prompt blocks and 1 output block at 0.5 are 3 blocks, halves rounded up."""
    active = busy(("a", [1, 2, 3, 4], 0, 0))
    active.add_output_block("a", 0.5)
    assert active.active_blocks == 3


def test_decay_leaves_shared_blocks_alone():
    active = busy(("a", [1, 2, 3, 4], 0, 0), ("b", [1, 2], 0, 0))
    active.add_output_block("a", 0.0)
    assert active.active_blocks == 2


def test_a_decayed_block_that_becomes_shared_weighs_in_full():
    active = busy(("a", [1, 2], 0, 0))
    active.add_output_block("a", 0.0)
    assert active.active_blocks == 0
    active.add("b", [1, 2], 0, 0)
    assert active.active_blocks == 2


def test_a_later_output_block_without_decay_weighs_in_full():
    active = busy(("a", [], 0, 0))
    active.add_output_block("a", 0.0)
    active.add_output_block("a")
    assert active.active_blocks == 1


IDS = st.sampled_from("abcd")


class Consistent(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.active = ActiveSequences()

    @rule(request_id=IDS, prompt=st.integers(0, 2), length=st.integers(0, 4),
          own=st.integers(0, 1), tokens=st.integers(0, 99))  # fmt: skip
    def add(self, request_id, prompt, length, own, tokens):
        if request_id not in self.active:
            hashes = [0, *range(10 * prompt, 10 * prompt + 4)][:length]
            self.active.add(request_id, hashes, own, tokens)

    @precondition(lambda self: self.active.active_requests)
    @rule(data=st.data(), fraction=st.none() | st.floats(0, 1))
    def grow(self, data, fraction):
        request_id = data.draw(st.sampled_from(self.active.request_ids))
        self.active.add_output_block(request_id, fraction)

    @precondition(lambda self: self.active.active_requests)
    @rule(data=st.data())
    def complete(self, data):
        self.active.prefill_complete(data.draw(st.sampled_from(self.active.request_ids)))

    @precondition(lambda self: self.active.active_requests)
    @rule(data=st.data())
    def free(self, data):
        self.active.free(data.draw(st.sampled_from(self.active.request_ids)))
        if not self.active.active_requests:
            assert self.active.active_blocks == 0

    @invariant()
    def holds(self):
        self.active.check_invariants()


Consistent.TestCase.settings = settings(max_examples=100, deadline=None)
TestConsistent = Consistent.TestCase
