"""The trie against a count of requests per slot and block."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.sequence.active.prompt_trie import MICRO, PromptTrie
from support.chaos.fuzzing import examples

SLOTS = 3


def hashes_of(path):
    """Equal prefixes have equal hashes, and different ones different hashes."""
    return np.array([hash(path[: i + 1]) & (2**64 - 1) for i in range(len(path))], np.uint64)


PATHS = st.lists(st.integers(0, 1), max_size=9).map(tuple)


class Against(RuleBasedStateMachine):
    """`requests`: (slot, path, where it ends). `weights`: of blocks with one request."""

    @initialize()
    def start(self):
        self.trie, self.requests = PromptTrie(), []
        self.weights = [{} for _ in range(SLOTS)]
        self.blocks, self.discount_micro = [0] * SLOTS, [0] * SLOTS

    def holders(self, slot):
        counts = {}
        for each, path, _ in self.requests:
            for i in range(len(path)) if each == slot else ():
                counts[path[: i + 1]] = counts.get(path[: i + 1], 0) + 1
        return counts

    @rule(slot=st.integers(0, SLOTS - 1), path=PATHS)
    def add(self, slot, path):
        for i in range(len(path)):
            self.weights[slot].pop(path[: i + 1], None)
        end, change = self.trie.add(slot, hashes_of(path))
        self.requests.append((slot, path, end))
        self.blocks[slot] += change.blocks
        self.discount_micro[slot] -= change.discount_micro

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def remove(self, data):
        slot, _, end = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        change = self.trie.remove(slot, end)
        self.blocks[slot] -= change.blocks
        self.discount_micro[slot] -= change.discount_micro
        left = self.holders(slot)
        self.weights[slot] = {p: w for p, w in self.weights[slot].items() if p in left}

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), weight_micro=st.sampled_from([0, 300_000, MICRO]))
    def weigh(self, data, weight_micro):
        slot, path, end = data.draw(st.sampled_from(self.requests))
        counts = self.holders(slot)
        for i in range(len(path)):
            if counts[path[: i + 1]] == 1:
                self.weights[slot][path[: i + 1]] = weight_micro
        self.discount_micro[slot] += self.trie.weigh(slot, end, weight_micro)

    @rule(path=PATHS)
    def look_up(self, path):
        depths = np.zeros(SLOTS)
        self.trie.write_depths(hashes_of(path), depths)
        for slot in range(SLOTS):
            counts = self.holders(slot)
            expected = sum(path[: i + 1] in counts for i in range(len(path)))
            assert depths[slot] == expected

    @invariant()
    def agrees(self):
        if not hasattr(self, "trie"):
            return
        self.trie.check_invariants()
        for slot in range(SLOTS):
            assert self.blocks[slot] == len(self.holders(slot))
            expected = sum(MICRO - weight for weight in self.weights[slot].values())
            assert self.discount_micro[slot] == expected


Against.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=30)
TestAgainstCounts = Against.TestCase


def test_prompts_of_many_blocks_are_a_node_or_two():
    trie = PromptTrie()
    shared = tuple(range(500))
    parts = [trie.add(0, hashes_of((*shared, 1000 + tail))) for tail in range(3)]
    assert [change.blocks for _, change in parts] == [501, 1, 1]
    assert [end.blocks for end, _ in parts] == [1, 1, 1]
    assert trie.remove(0, parts[0][0]).blocks == 1
    assert trie.remove(0, parts[1][0]).blocks == 1
    assert parts[2][0].blocks == 501
    assert trie.remove(0, parts[2][0]).blocks == 501
