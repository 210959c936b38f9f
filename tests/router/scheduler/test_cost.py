"""Cost policies, by hand."""

import pytest

from router.protocol.replies import TrustState
from router.protocol.values import Rank
from router.scheduler.cost import Terms, TrustWeights, dynamo_1_0


def terms(prefill_tokens, decode_blocks, block_size=16):
    return Terms(Rank(1, 0), block_size, 0, 0, prefill_tokens, decode_blocks, 0)


@pytest.mark.parametrize(
    ("prefill_tokens", "decode_blocks", "weight", "cost"),
    [
        (160, 10, 1.0, 10 + 10),
        (160, 10, 2.0, 20 + 10),
        (40, 3, 1.0, 2.5 + 3),
        (0, 7, 1.0, 7),
        (160, 10, 0.0, 10),
        (2385 - 2128 + 161, 150 + 16, 1.0, 192.125),
    ],
)
def test_dynamo_1_0(prefill_tokens, decode_blocks, weight, cost):
    assert dynamo_1_0(terms(prefill_tokens, decode_blocks), weight) == cost


def test_counts_prefill_in_blocks_of_the_workers_own_size():
    assert dynamo_1_0(terms(128, 0, block_size=32), 1.0) == 4


@pytest.mark.parametrize(
    ("state", "blocks"),
    [
        (TrustState.EXACT, 10),
        (TrustState.LAGGING, 10),
        (TrustState.DEGRADED, 5),
        (TrustState.BLIND, 0),
    ],
)
def test_overlap_counts_by_the_trust_in_it(state, blocks):
    assert TrustWeights().trusted_blocks(10, state) == blocks


def test_what_trust_is_worth_can_be_set():
    assert TrustWeights(degraded=0.1).trusted_blocks(10, TrustState.DEGRADED) == 1
