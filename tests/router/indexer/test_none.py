"""The index that keeps nothing."""

import numpy as np
import pytest

from router.indexer.base import NOTHING_HELD, HeldSummary
from router.indexer.errors import IndexDisabledError
from router.indexer.factory import DisabledIndex
from router.protocol.values import Rank, Tier

W1, BLOCKS = Rank(1, 0), np.array([1, 2], dtype=np.uint64)


def test_disabled_index_accepts_changes_and_shows_nothing():
    index = DisabledIndex()
    index.expect(1000)
    assert index.store(W1, Tier.DEVICE, BLOCKS)
    assert index.stage(W1, Tier.HOST, BLOCKS)
    index.commit_staged(W1)
    index.note_holes(W1, (0, 0, 0, 0))
    assert index.find_matches(BLOCKS) == {}
    assert index.summary(W1) == NOTHING_HELD
    index.remove(W1, Tier.DEVICE, BLOCKS)
    index.drop_staged(W1)
    index.clear(W1)
    assert not index.sweep(1)


def test_disabled_index_reports_no_differences():
    index = DisabledIndex()
    index.check(W1, HeldSummary((2, 0, 0, 0), (3, 0, 0, 0)))
    assert index.take_differing() == []


def test_a_dump_is_refused_with_its_cause():
    with pytest.raises(IndexDisabledError) as caught:
        DisabledIndex().dump()
    assert caught.value.http_status == 409
    assert caught.value.body() == {
        "error": "no index is kept: overlap_score_weight is 0 (allowed: above 0, at start)",
        "code": "index_disabled",
        "setting": "overlap_score_weight",
    }
