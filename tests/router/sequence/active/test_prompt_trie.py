"""The bookings of several ranks against counts of requests per rank and block."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.protocol.values import Rank
from router.sequence.active.footprint import Footprint
from router.sequence.active.tracker import Tracker
from router.sequence.rank_table import DECODE_BLOCKS, RankTable
from support.chaos.fuzzing import examples

RANKS = [Rank(1, 0), Rank(1, 1), Rank(2, 0)]
MICRO = 1_000_000


def hashes_of(path):
    """Equal prefixes have equal hashes, and different ones different hashes."""
    return np.array([hash(path[: i + 1]) & (2**64 - 1) for i in range(len(path))], np.uint64)


def prompt(path):
    return Footprint(hashes_of(path), 0, 16 * len(path), 0, 16)


PATHS = st.lists(st.integers(0, 1), max_size=9).map(tuple)


class Against(RuleBasedStateMachine):
    """`requests`: rank and path by id. `weights`: of blocks that one request of a rank holds.

    `outputs`: the number of output blocks of each request, and the weight of those weighed.
    """

    @initialize()
    def start(self):
        self.table = RankTable()
        for rank in RANKS:
            self.table.add(rank)
        self.tracker, self.requests, self.number = Tracker(1e9, self.table), {}, 0
        self.weights, self.outputs = {rank: {} for rank in RANKS}, {}

    def holders(self, rank):
        counts = {}
        for each, path in self.requests.values():
            for i in range(len(path)) if each == rank else ():
                counts[path[: i + 1]] = counts.get(path[: i + 1], 0) + 1
        return counts

    @rule(rank=st.sampled_from(RANKS), path=PATHS)
    def add(self, rank, path):
        for i in range(len(path)):
            self.weights[rank].pop(path[: i + 1], None)
        self.number += 1
        request_id = f"r{self.number}"
        self.tracker.book(request_id, rank, prompt(path), 0.0)
        self.requests[request_id], self.outputs[request_id] = (rank, path), (0, 0)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def remove(self, data):
        request_id = data.draw(st.sampled_from(list(self.requests)))
        rank, _ = self.requests.pop(request_id)
        del self.outputs[request_id]
        self.tracker.free(request_id, 0.0)
        left = self.holders(rank)
        self.weights[rank] = {p: w for p, w in self.weights[rank].items() if p in left}

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), weight_micro=st.sampled_from([0, 300_000, MICRO]))
    def weigh(self, data, weight_micro):
        request_id = data.draw(st.sampled_from(list(self.requests)))
        rank, path = self.requests[request_id]
        counts = self.holders(rank)
        for i in range(len(path)):
            if counts[path[: i + 1]] == 1:
                self.weights[rank][path[: i + 1]] = weight_micro
        blocks = self.outputs[request_id][0] + 1
        self.outputs[request_id] = blocks, blocks * (MICRO - weight_micro)
        self.tracker.add_output_blocks(request_id, 1, weight_micro / MICRO, 0.0)

    @invariant()
    def agrees(self):
        if not hasattr(self, "tracker"):
            return
        self.tracker.check_invariants()
        for rank in RANKS:
            outputs = [self.outputs[i] for i, (its, _) in self.requests.items() if its == rank]
            blocks = len(self.holders(rank)) + sum(blocks for blocks, _ in outputs)
            discount_micro = sum(MICRO - weight for weight in self.weights[rank].values())
            discount_micro += sum(discount for _, discount in outputs)
            expected = (blocks * MICRO - discount_micro + MICRO // 2) // MICRO
            assert self.table.row(rank)[DECODE_BLOCKS] == expected


Against.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=30)
TestAgainstCounts = Against.TestCase


@pytest.mark.parametrize("prompts", [3_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_many_prompts_with_shared_beginnings_leave_nothing_behind(prompts):
    """More than the first rows and tables hold, so that all of them grow."""
    table, random = RankTable(), np.random.default_rng(4)
    for rank in RANKS:
        table.add(rank)
    tracker, live = Tracker(1e9, table), []
    for number in range(prompts):
        path = tuple(random.integers(0, 3, random.integers(1, 12)).tolist())
        tracker.book(f"r{number}", RANKS[number % 3], prompt(path), 0.0)
        live.append(f"r{number}")
        if number % 3 == 0:
            tracker.free(live.pop(int(random.integers(len(live)))), 0.0)
    tracker.check_invariants()
    for request_id in live:
        tracker.free(request_id, 0.0)
    tracker.check_invariants()
    assert not table.values.any()


def test_prompts_whose_hashes_contradict_each_other_are_freed():
    """Callers may send any hashes: equal ones behind different beginnings, or the same twice."""
    table, random = RankTable(), np.random.default_rng(5)
    table.add(RANKS[0])
    tracker = Tracker(1e9, table)
    for number in range(500):
        hashes = random.integers(0, 4, random.integers(0, 9)).astype(np.uint64)
        tracker.book(f"r{number}", RANKS[0], Footprint(hashes, 0, 999, 0, 16), 0.0)
    for number in random.permutation(500).tolist():
        tracker.add_output_blocks(f"r{number}", 1, 0.5, 0.0)
        tracker.free(f"r{number}", 0.0)
    assert not table.values.any()
