"""Long random sequences of changes: a radix tree, and four of them, against the definition."""

import pytest

from oracle.machine import IndexMachine, sequence_settings
from router.indexer.concurrent import ConcurrentIndex
from router.indexer.radix_tree.radix_tree import RadixTree
from support.chaos.fuzzing import IS_FUZZING

TIMEOUT_S = 0 if IS_FUZZING else 600


def small_tree(random):
    """So small that sub-tables crowd and grow; checks of its own answers are rare, or many."""
    sub_bits, check_interval = random.randint(1, 2), random.choice([2, 5, 10**9])
    return RadixTree(3000, sub_bits=sub_bits, check_interval=check_interval)


class TreeMachine(IndexMachine):
    def make(self, random):
        return small_tree(random)

    def trees(self):
        return [self.index]


class ShardsMachine(IndexMachine):
    def make(self, random):
        self.made = []

        def make():
            self.made.append(small_tree(random))
            return self.made[-1]

        return ConcurrentIndex(make, shards=4)

    def trees(self):
        self.index.flush()
        return self.made


TreeMachine.TestCase.settings = sequence_settings(10)
ShardsMachine.TestCase.settings = sequence_settings(5)
TestTree = pytest.mark.timeout(TIMEOUT_S)(TreeMachine.TestCase)
TestShards = pytest.mark.timeout(TIMEOUT_S)(ShardsMachine.TestCase)
