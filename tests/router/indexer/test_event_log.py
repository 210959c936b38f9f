"""What to do with the next message of a rank."""

import numpy as np
import pytest

from router.indexer.event_log import EventLog, Verdict
from router.protocol.events import Checkpoint, EventBatch, Stored, TierBlocks
from router.protocol.values import SCHEME, HeldState, Identity, Tier, pack_hashes

IDENTITY = Identity(SCHEME, 16)
LIFE, NEXT_LIFE = 100, 200


def packed(*hashes):
    return pack_hashes(np.array(hashes, dtype=np.uint64))


def batch(first_event_id, events=1, incarnation=LIFE):
    stored = tuple(Stored(Tier.DEVICE, packed(first_event_id + i)) for i in range(events))
    return EventBatch(1, 0, incarnation, IDENTITY, first_event_id, stored, HeldState())


def checkpoint(event_id, incarnation=LIFE, part=0, parts=1, blocks=()):
    return Checkpoint(1, 0, incarnation, IDENTITY, event_id, part, parts, blocks, HeldState())


@pytest.fixture
def log():
    log = EventLog(now_s=0.0)
    log.classify(checkpoint(10))
    log.advance(checkpoint(10), now_s=1.0)
    return log


def test_is_blind_until_a_checkpoint():
    log = EventLog(now_s=5.0)
    assert (log.is_blind, log.doubt_since_s) == (True, 5.0)
    assert log.classify(batch(1)) is Verdict.GAP
    assert log.classify(checkpoint(7)) is Verdict.NEW_LIFE


def test_applies_what_follows(log):
    assert log.classify(batch(11, events=3)) is Verdict.APPLY
    log.advance(batch(11, events=3), now_s=2.0)
    assert (log.cursor, log.updated_s) == (13, 2.0)


def test_passes_over_what_was_seen(log):
    assert log.classify(batch(8, events=3)) is Verdict.DUPLICATE
    assert log.classify(checkpoint(10)) is Verdict.DUPLICATE
    assert log.classify(checkpoint(9)) is Verdict.DUPLICATE


def test_applies_only_the_unseen_end_of_a_batch(log):
    overlapping = batch(9, events=4)
    assert log.classify(overlapping) is Verdict.APPLY
    assert log.unseen_events(overlapping) == overlapping.events[2:]


def test_a_gap_is_a_gap_until_a_checkpoint_heals_it(log):
    assert log.classify(batch(12)) is Verdict.GAP
    log.break_off("events missing", now_s=3.0)
    assert log.classify(batch(11)) is Verdict.GAP
    assert log.classify(checkpoint(20)) is Verdict.APPLY
    log.advance(checkpoint(20), now_s=4.0)
    assert (log.broken_reason, log.doubt_since_s) == (None, None)
    assert log.classify(batch(21)) is Verdict.APPLY


def test_an_old_checkpoint_heals_what_is_broken(log):
    log.break_off("digest differs", now_s=3.0)
    assert log.classify(checkpoint(10)) is Verdict.APPLY


def test_a_new_life_begins_with_a_checkpoint_and_nothing_else(log):
    assert log.classify(batch(11, incarnation=NEXT_LIFE)) is Verdict.GAP
    assert log.classify(checkpoint(0, NEXT_LIFE)) is Verdict.NEW_LIFE
    log.advance(checkpoint(0, NEXT_LIFE), now_s=4.0)
    assert (log.incarnation, log.cursor) == (NEXT_LIFE, 0)
    assert log.classify(batch(1, incarnation=NEXT_LIFE)) is Verdict.APPLY


def test_a_checkpoint_in_parts_counts_with_its_last(log):
    parts = [
        checkpoint(20, part=i, parts=3, blocks=(TierBlocks(tier, packed(i, 10 + i)),))
        for i, tier in enumerate((Tier.DEVICE, Tier.DEVICE, Tier.HOST))
    ]
    verdicts = [log.classify(part) for part in parts]
    assert verdicts == [Verdict.PARTIAL, Verdict.PARTIAL, Verdict.APPLY]
    blocks = {tier: hashes.tolist() for tier, hashes in log.collected_blocks().items()}
    assert blocks == {Tier.DEVICE: [0, 10, 1, 11], Tier.HOST: [2, 12]}


def test_a_checkpoint_cut_short_is_dropped_when_the_next_begins(log):
    log.classify(checkpoint(20, part=0, parts=2))
    assert log.classify(checkpoint(30, part=1, parts=2)) is Verdict.PARTIAL
    assert log.classify(checkpoint(30, part=0, parts=2)) is Verdict.PARTIAL
    assert log.classify(checkpoint(30, part=1, parts=2)) is Verdict.APPLY


def test_a_checkpoint_that_says_nothing_new_is_not_kept(log):
    for part in (0, 1):
        verdict = log.classify(checkpoint(10, part=part, parts=2))
    assert verdict is Verdict.DUPLICATE
    assert log.collected_blocks() == {}


def test_a_doubt_dates_from_its_first_sign(log):
    log.doubt(3.0)
    log.doubt(9.0)
    assert log.doubt_since_s == 3.0
