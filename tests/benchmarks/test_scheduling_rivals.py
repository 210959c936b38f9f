"""Rivals that the router does not ship."""

from random import Random

import numpy as np
import pytest
from scheduling_rivals import LlmD

from router.protocol.values import Rank, Scope
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import CACHED_BLOCKS, COLUMNS, TermTable
from router.sequence.rank_table import BLOCK_SIZE, DECODING_KV_TOKENS, PREFILL_TOKENS


@pytest.fixture
def choose():
    def choose(policy, *ranks):
        """Of a prompt of ten blocks; each rank has cached blocks, queued and decoding tokens."""
        values = np.zeros((len(ranks), COLUMNS))
        values[:, BLOCK_SIZE] = 16
        values[:, [CACHED_BLOCKS, PREFILL_TOKENS, DECODING_KV_TOKENS]] = ranks
        table = TermTable(Scope(), [Rank(i, 0) for i in range(len(ranks))], values, 160, None, 0.0)
        return policy.choose(table, PolicySettings(), Random(1)).index

    return choose


def test_least_loaded_of_the_sticky_is_chosen(choose):
    assert choose(LlmD(), (0, 0, 0), (8, 900, 0), (9, 500, 300), (7, 0, 0)) == 2


def test_affinity_gives_way_to_a_penalty(choose):
    assert choose(LlmD(penalty_tokens=800), (0, 0, 0), (8, 800, 0)) == 1
    assert choose(LlmD(penalty_tokens=800), (0, 0, 0), (8, 801, 0)) == 0


def test_without_a_sticky_rank_the_least_loaded_is_chosen(choose):
    assert choose(LlmD(), (7, 200, 0), (0, 100, 50)) == 1
    assert choose(LlmD(affinity=0.7), (7, 200, 0), (0, 100, 50)) == 0
