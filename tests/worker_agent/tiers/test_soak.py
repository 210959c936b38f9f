"""Some seconds of what `make soak` does for ten minutes."""

import pytest

from support.blocks.block_soak import soak

pytestmark = pytest.mark.integration


def test_tiers_under_faults_never_give_a_wrong_byte_nor_lose_a_block():
    counts = soak(seconds=4.0, seed=2)
    # How much comes to pass in so short a time is the machine's affair.
    assert min(counts["ended"], counts["stored"]) > 0
