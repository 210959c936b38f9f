"""Rows for ranks, used again."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from router.protocol.values import Rank
from router.sequence.rank_table import FIRST_CAPACITY, HELD_BLOCKS, RankTable

RANKS = st.builds(Rank, st.integers(0, 40), st.integers(0, 1))


class RankTableMachine(RuleBasedStateMachine):
    """Against a dictionary of what was written."""

    def __init__(self):
        super().__init__()
        self.table = RankTable()
        self.written = {}

    @rule(rank=RANKS, held=st.integers(1, 9))
    def add(self, rank, held):
        self.table.add(rank)
        self.table.row(rank)[HELD_BLOCKS] = held
        self.written[rank] = held
        self.compare()

    @rule(rank=RANKS)
    def drop(self, rank):
        self.table.drop(rank)
        self.written.pop(rank, None)
        self.compare()

    def compare(self):
        self.table.check_invariants()
        assert {rank: self.table.row(rank)[HELD_BLOCKS] for rank in self.table} == self.written
        assert len(self.table) == len(self.written)


TestRankTable = RankTableMachine.TestCase


def test_growing_keeps_slots_and_values():
    table = RankTable()
    slots = [table.add(Rank(i, 0)) for i in range(FIRST_CAPACITY)]
    table.values[slots[3], HELD_BLOCKS] = 7
    table.add(Rank(99, 0))
    assert [table.slot(Rank(i, 0)) for i in range(FIRST_CAPACITY)] == slots
    assert table.values[slots[3], HELD_BLOCKS] == 7
    assert table.find(Rank(98, 0)) is None
    assert Rank(99, 0) in table
