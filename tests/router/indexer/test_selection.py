"""Which index the settings ask for."""

import numpy as np
import pytest

from router.indexer.base import NOTHING_HELD, IndexMode
from router.indexer.concurrent import ConcurrentIndex
from router.indexer.errors import IndexDisabledError
from router.indexer.factory import DisabledIndex, IndexSettings, index_mode, make_indexer
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.values import Rank, Tier

W1, BLOCKS = Rank(1, 0), np.array([1, 2], dtype=np.uint64)


def settings(**changes):
    defaults = {
        "overlap_score_weight": 1.0,
        "use_kv_events": True,
        "event_threads": 1,
        "max_blocks": 1000,
    }
    return IndexSettings(**{**defaults, **changes})


def test_events_are_kept_in_one_tree():
    index = make_indexer(settings())
    assert isinstance(index, RadixTree)
    assert index.stats().max_blocks == 1000


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_the_limit_on_blocks(threads):
    index = make_indexer(settings(event_threads=threads))
    assert isinstance(index, ConcurrentIndex)
    assert 1000 <= index.stats().max_blocks < 1000 + threads
    index.store(W1, Tier.DEVICE, BLOCKS)
    assert index.find_matches(BLOCKS)[W1].device == 2
    index.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("use_kv_events", [True, False])
def test_without_overlap_weight_no_index_is_kept_and_dumps_are_refused(threads, use_kv_events):
    index = make_indexer(
        settings(overlap_score_weight=0.0, use_kv_events=use_kv_events, event_threads=threads)
    )
    assert isinstance(index, DisabledIndex)
    with pytest.raises(IndexDisabledError):
        index.dump()


def test_without_events_nothing_is_kept_and_dumps_are_empty():
    index = make_indexer(settings(use_kv_events=False, event_threads=2))
    assert index.store(W1, Tier.DEVICE, BLOCKS)
    assert index.summary(W1) == NOTHING_HELD
    assert list(index.dump()) == []


@pytest.mark.parametrize(
    ("weight", "use_kv_events", "expected"),
    [
        (1.0, False, IndexMode.APPROXIMATE),
        (0.0, False, IndexMode.NONE),
        (0.0, True, IndexMode.NONE),
        (0.5, True, IndexMode.EVENTS),
    ],
)
def test_overlap_is_estimated_where_weighed_without_events(weight, use_kv_events, expected):
    asked = settings(overlap_score_weight=weight, use_kv_events=use_kv_events)
    assert index_mode(asked) is expected
