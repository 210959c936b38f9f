"""The index that keeps nothing."""

import numpy as np
import pytest

from router.errors import IndexDisabledError
from router.indexer.base import NOTHING_HELD, HeldSummary
from router.indexer.none import NoneIndex
from router.protocol.values import Rank, Tier

W1, BLOCKS = Rank(1, 0), np.array([1, 2], dtype=np.uint64)


def test_it_takes_every_change_and_shows_nothing():
    index = NoneIndex()
    index.expect(1000)
    assert index.store(W1, Tier.DEVICE, BLOCKS)
    assert index.stage(W1, Tier.HOST, BLOCKS)
    index.commit_staged(W1)
    index.note_holes(W1, (0, 0, 0, 0))
    assert index.find_matches(BLOCKS) == {}
    assert (index.summary(W1), index.block_count()) == (NOTHING_HELD, 0)
    index.remove(W1, Tier.DEVICE, BLOCKS)
    index.drop_staged(W1)
    index.clear(W1)
    assert not index.sweep(1)


def test_nobody_is_found_to_differ_from_it():
    index = NoneIndex()
    index.check(W1, HeldSummary((2, 0, 0, 0), (3, 0, 0, 0)))
    assert index.take_differing() == []


def test_a_dump_is_refused_with_its_cause():
    with pytest.raises(IndexDisabledError) as caught:
        NoneIndex().dump()
    assert caught.value.http_status == 409
    assert caught.value.body() == {
        "error": "no index is kept: overlap_score_weight is 0 (allowed: above 0, at start)",
        "code": "index_disabled",
        "setting": "overlap_score_weight",
    }
