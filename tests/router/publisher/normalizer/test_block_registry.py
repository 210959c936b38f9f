"""Blocks with local hashes in place of tokens, and publishers that count copies themselves."""

import numpy as np
import pytest

from router.protocol.values import Doubt, Tier
from router.publisher.engine_events.batch import EngineCleared
from router.publisher.normalizer.settings import EngineSettings, NormalizerLimits
from router.sequence.hashing.block_hashes import chain, local_block_hashes, token_array
from support.engines.engines import CLEARED, Edge, batch, names, removed, stored

TOKENS = list(range(1, 21))
LOCALS = local_block_hashes(token_array(TOKENS), 4).tolist()


def hashed(hashes, local_hashes, parent=None, **fields):
    fields["local_hashes"] = np.array(local_hashes, np.uint64)
    return stored(hashes, [], parent, **fields)


def test_local_hashes_give_the_names_of_their_tokens():
    edge = Edge().feed(hashed([1, 2, 3], LOCALS[:3]), hashed([4, 5], LOCALS[3:], 3))
    assert edge.held() == set(names(TOKENS))
    assert (edge.counts.stored, edge.doubts) == (5, 0)


def test_tokens_continue_after_local_hashes():
    edge = Edge().feed(hashed([1, 2], LOCALS[:2]), stored([3, 4, 5], TOKENS[8:], 2))
    assert edge.held() == set(names(TOKENS))


def test_fewer_local_hashes_than_blocks_are_refused():
    edge = Edge().feed(hashed([1, 2], LOCALS[:1]))
    assert (edge.held(), edge.doubts) == (set(), Doubt.UNREADABLE)
    assert edge.normalizer.take_complaints() == ["stored event refused: 1 local hashes of 2 blocks"]


def test_reused_hash_replaces_its_block_in_all_tiers():
    edge = Edge().feed(hashed([1, 2], [10, 20]), hashed([1], [10], medium="CPU"))
    edge.feed(hashed([1, 2], [10, 21]))
    assert edge.held() == {10, chain([10, 21])[1]}
    edge.feed(hashed([1], [11]))
    assert (edge.held(), edge.held(Tier.HOST)) == ({11, chain([10, 21])[1]}, set())
    edge.feed(removed([1]), removed([2]))
    assert (edge.held(), edge.doubts) == (set(), 0)


def test_children_of_a_replaced_block_keep_their_names():
    edge = Edge().feed(hashed([1, 2, 3], [10, 20, 30]))
    first = chain([10, 20, 30]).tolist()
    edge.feed(hashed([1, 4], [11, 40]))
    assert edge.held() == {*first[1:], *chain([11, 40]).tolist()}
    edge.feed(hashed([5], [50], 3))
    assert chain([10, 20, 30, 50])[3] in edge.held()
    edge.feed(removed([1, 2, 3, 4, 5]))
    assert edge.held() == set()


def test_former_content_of_an_orphan_does_not_replace_a_block():
    edge = Edge().feed(hashed([3], [30], 2), hashed([3], [31]), removed([3]))
    edge.feed(hashed([3], [31]), hashed([2], [20]))
    assert edge.held() == {20, 31}
    assert edge.doubts == Doubt.UNREADABLE


def test_deduplicated_stores_are_one_copy_without_a_doubt():
    edge = Edge(report_mode="deduplicated")
    edge.feed(hashed([1, 2], [10, 20]), hashed([1, 2], [10, 20]), removed([2]))
    assert (edge.held(), edge.doubts) == ({10}, 0)


def test_new_life_may_report_copies_in_another_way():
    edge = Edge(report_mode="deduplicated").feed(hashed([1], [10]))
    edge.normalizer.reset(EngineSettings())
    edge.feed(hashed([1], [10]), hashed([1], [10]), removed([1]))
    assert edge.held() == {10}


def test_cleared_tier_leaves_the_others_and_ends_doubts_once_all_are_empty():
    edge = Edge().feed(hashed([1], [10]), hashed([1], [10], medium="CPU"))
    edge.normalizer.note_gap()
    edge.feed(EngineCleared(Tier.HOST))
    assert (edge.held(), edge.held(Tier.HOST)) == ({10}, set())
    assert edge.doubts == Doubt.EVENTS_LOST
    edge.feed(EngineCleared(Tier.DEVICE))
    assert (edge.held(), edge.doubts) == (set(), 0)


def test_gap_without_replay_keeps_blocks_in_doubt():
    edge = Edge().feed(hashed([1], [10]))
    edge.normalizer.note_gap()
    assert edge.feed().doubts == Doubt.EVENTS_LOST
    assert edge.held() == {10}
    assert edge.feed(CLEARED).doubts == 0


@pytest.mark.parametrize(("wait_s", "doubts"), [(1.9, 0), (2.0, Doubt.ORPHANS)])
def test_orphans_are_a_doubt_after_a_time(wait_s, doubts):
    edge = Edge(limits=NormalizerLimits(held_back_s=9.0, doubt_after_s=2.0))
    edge.feed(hashed([2], [20], 1))
    edge.now_s += wait_s
    assert edge.feed().doubts == doubts
    assert edge.feed(hashed([1], [10])).doubts == 0


def test_dropped_orphans_are_a_doubt_at_once():
    edge = Edge(limits=NormalizerLimits(held_back_blocks=1, doubt_after_s=2.0))
    edge.feed(hashed([2], [20], 1), hashed([4], [40], 3))
    assert edge.doubts == Doubt.ORPHANS
    assert edge.feed(removed([2, 4])).doubts == 0


def test_removed_orphans_are_purged_unless_others_wait_for_them():
    edge = Edge(limits=NormalizerLimits(held_back_blocks=1 << 16, held_back_s=1e9))
    edge.feed(hashed([2], [20], 1), hashed([3], [30], 2), removed([2]))
    for first in range(10_000, 30_000, 100):
        blocks = list(range(first, first + 100))
        edge.normalizer.apply(batch(hashed(blocks, blocks, 9), removed(blocks)), 0.0)
    assert edge.normalizer.stats.waiting_blocks < 5_000
    edge.feed(hashed([1], [10]))
    assert edge.held() == {10, chain([10, 20, 30])[2]}
