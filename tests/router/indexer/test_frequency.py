"""How often blocks were used lately, against a plain list of uses."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.indexer.frequency import UseCounts
from router.sequence.hashing.block_hashes import chain
from support.chaos.fuzzing import examples

WINDOW_S = 10.0


def array(*hashes):
    return np.array(hashes, dtype=np.uint64)


@pytest.fixture
def counts():
    return UseCounts(WINDOW_S, 100)


def test_a_use_is_counted_after_it_is_answered(counts):
    assert counts.note(array(1, 2), 0.0) == []
    assert counts.note(array(1, 2), 1.0) == [1, 1]
    assert counts.note(array(1), 2.0) == [2]
    assert counts.note(array(1, 2), 3.0) == [3, 2]


def test_blocks_without_uses_are_left_out(counts):
    counts.note(array(1), 0.0)
    assert counts.note(array(1, 2, 3), 1.0) == [1]


def test_a_use_counts_up_to_the_end_of_the_window(counts):
    counts.note(array(1, 2), 0.0)
    assert counts.note(array(1), WINDOW_S) == [1]
    assert counts.note(array(1, 2), WINDOW_S + 0.5) == [1]
    assert counts.note(array(1, 2), 3 * WINDOW_S) == []
    assert (counts.use_count(), counts.forgotten_uses) == (2, 0)


def test_no_match_is_no_use(counts):
    assert counts.note(array(), 0.0) == []
    assert counts.use_count() == 0
    counts.check_invariants()


def test_over_the_limit_the_oldest_are_forgotten_deepest_first():
    counts = UseCounts(WINDOW_S, 5)
    counts.note(array(1, 2, 3), 0.0)
    counts.note(array(1, 2, 4, 5), 1.0)
    assert (counts.use_count(), counts.forgotten_uses) == (5, 2)
    assert counts.note(array(1, 2, 3), 2.0) == [2, 1]


def test_a_prompt_longer_than_the_limit_counts_at_its_beginning():
    counts = UseCounts(WINDOW_S, 3)
    counts.note(array(9), 0.0)
    counts.note(array(1, 2, 3, 4, 5), 0.0)
    assert (counts.use_count(), counts.forgotten_uses) == (3, 3)
    assert counts.note(array(1, 2, 3, 4, 5), 1.0) == [1, 1, 1]


def test_a_limit_of_nothing_counts_nothing():
    counts = UseCounts(WINDOW_S, 0)
    assert counts.note(array(1), 0.0) == counts.note(array(1), 1.0) == []
    assert counts.forgotten_uses == 2
    counts.check_invariants()


def test_the_callers_array_may_change_afterwards(counts):
    prompt = array(1, 2)
    counts.note(prompt, 0.0)
    prompt[:] = 7
    assert counts.note(array(1, 2), 1.0) == [1, 1]
    counts.check_invariants()


class AgainstTheList(RuleBasedStateMachine):
    @initialize(max_uses=st.integers(0, 30))
    def start(self, max_uses):
        self.counts, self.max_uses = UseCounts(WINDOW_S, max_uses), max_uses
        self.uses, self.forgotten, self.now_s = [], 0, 0.0

    @rule(path=st.lists(st.integers(0, 1), max_size=6))
    def note(self, path):
        hashes = chain(path).tolist()
        self.uses = [use for use in self.uses if use[0] >= self.now_s - WINDOW_S]
        numbers = [sum(use[1] == h for use in self.uses) for h in hashes]
        frequencies = self.counts.note(array(*hashes), self.now_s)
        assert frequencies == [number for number in numbers if number]
        assert frequencies == sorted(frequencies, reverse=True)
        self.remember(hashes)

    def remember(self, hashes):
        """Uses in the order they are forgotten: by age, the deepest of a prefix first."""
        self.uses += [(self.now_s, h) for h in reversed(hashes)]
        excess = max(0, len(self.uses) - self.max_uses)
        self.uses, self.forgotten = self.uses[excess:], self.forgotten + excess

    @rule(passed_s=st.sampled_from([0.5, 3.0, 7.0, 10.0]))
    def wait(self, passed_s):
        self.now_s += passed_s

    @invariant()
    def holds(self):
        self.counts.check_invariants()
        assert self.counts.use_count() == len(self.uses)
        assert self.counts.forgotten_uses == self.forgotten


AgainstTheList.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestAgainstTheList = AgainstTheList.TestCase
