"""Some seconds of what `make soak` does for ten minutes."""

from collections import Counter

import pytest

from support.blocks.block_soak import FAULTS, soak

pytestmark = pytest.mark.integration


def test_tiers_under_faults_never_give_a_wrong_byte_nor_lose_a_block():
    counts = soak(seconds=4.0, seed=2)
    # How much comes to pass in so short a time is the machine's affair.
    assert min(counts["ended"], counts["stored"]) > 0


@pytest.mark.long
def test_two_hundred_faults_of_every_kind_never_give_a_wrong_byte():
    counts, seeds = Counter(), iter(range(20))
    while sum(counts[fault] for fault in FAULTS) < 200 or not counts.keys() >= FAULTS:
        counts += soak(20.0, next(seeds))
    assert counts["loaded"] > 0
