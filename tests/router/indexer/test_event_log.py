"""What to do with the next message of a rank."""

import numpy as np
import pytest

from router.indexer.event_log import EventLog, LogVerdict
from router.protocol.events import Checkpoint, EventBatch, Stored, TierBlocks, pack_batch
from router.protocol.values import SCHEME, HeldState, Identity, Tier, pack_hashes

IDENTITY = Identity(SCHEME, 16)
LIFE, NEXT_LIFE = 100, 200


def packed(*hashes):
    return pack_hashes(np.array(hashes, dtype=np.uint64))


def batch(first_event_id, events=1, incarnation=LIFE):
    stored = [Stored(Tier.DEVICE, packed(first_event_id + i)) for i in range(events)]
    batch = pack_batch(HeldState(), stored)
    return EventBatch(
        1, 0, incarnation, IDENTITY, first_event_id, first_event_id + events - 1, batch
    )


def advance(log, message):
    event_id = getattr(message, "last_event_id", None) or message.event_id
    log.resume(message.incarnation, event_id)


def checkpoint(event_id, incarnation=LIFE, part=0, parts=1, blocks=()):
    return Checkpoint(1, 0, incarnation, IDENTITY, event_id, part, parts, blocks, HeldState())


@pytest.fixture
def log():
    log = EventLog(now_s=0.0)
    log.classify(checkpoint(10))
    advance(log, checkpoint(10))
    return log


def test_is_blind_until_a_checkpoint():
    log = EventLog(now_s=5.0)
    assert (log.is_blind, log.doubt_since_s) == (True, 5.0)
    assert log.classify(batch(1)) is LogVerdict.GAP
    assert log.classify(checkpoint(7)) is LogVerdict.NEW_LIFE


def test_next_batch_is_applied(log):
    assert log.classify(batch(11, events=3)) is LogVerdict.APPLY
    advance(log, batch(11, events=3))
    assert log.cursor == 13


def test_batches_already_read_are_ignored(log):
    assert log.classify(batch(8, events=3)) is LogVerdict.DUPLICATE
    assert log.classify(checkpoint(10)) is LogVerdict.DUPLICATE
    assert log.classify(checkpoint(9)) is LogVerdict.DUPLICATE


def test_a_batch_that_overlaps_what_was_read_is_applied(log):
    assert log.classify(batch(9, events=4)) is LogVerdict.APPLY


def test_a_gap_is_a_gap_until_a_checkpoint_heals_it(log):
    assert log.classify(batch(12)) is LogVerdict.GAP
    log.break_off("events missing", now_s=3.0)
    assert log.classify(batch(11)) is LogVerdict.GAP
    assert log.classify(checkpoint(20)) is LogVerdict.APPLY
    advance(log, checkpoint(20))
    assert (log.broken_reason, log.doubt_since_s) == (None, None)
    assert log.classify(batch(21)) is LogVerdict.APPLY


def test_an_old_checkpoint_heals_what_is_broken(log):
    log.break_off("digest differs", now_s=3.0)
    assert log.classify(checkpoint(10)) is LogVerdict.APPLY


def test_a_new_life_begins_with_a_checkpoint_and_nothing_else(log):
    assert log.classify(batch(11, incarnation=NEXT_LIFE)) is LogVerdict.GAP
    assert log.classify(checkpoint(0, NEXT_LIFE)) is LogVerdict.NEW_LIFE
    advance(log, checkpoint(0, NEXT_LIFE))
    assert (log.incarnation, log.cursor) == (NEXT_LIFE, 0)
    assert log.classify(batch(1, incarnation=NEXT_LIFE)) is LogVerdict.APPLY


def test_a_checkpoint_in_parts_counts_with_its_last(log):
    parts = [
        checkpoint(20, part=i, parts=3, blocks=(TierBlocks(tier, packed(i, 10 + i)),))
        for i, tier in enumerate((Tier.DEVICE, Tier.DEVICE, Tier.HOST))
    ]
    verdicts = [log.classify(part) for part in parts]
    assert verdicts == [LogVerdict.PARTIAL, LogVerdict.PARTIAL, LogVerdict.APPLY]
    blocks = [(tier, hashes.tolist()) for tier, hashes in log.collected_blocks()]
    assert blocks == [(Tier.DEVICE, [0, 10]), (Tier.DEVICE, [1, 11]), (Tier.HOST, [2, 12])]


def test_a_checkpoint_cut_short_is_dropped_when_the_next_begins(log):
    log.classify(checkpoint(20, part=0, parts=2))
    assert log.classify(checkpoint(30, part=1, parts=2)) is LogVerdict.PARTIAL
    assert log.classify(checkpoint(30, part=0, parts=2)) is LogVerdict.PARTIAL
    assert log.classify(checkpoint(30, part=1, parts=2)) is LogVerdict.APPLY


def test_checkpoint_without_news_is_dropped(log):
    for part in (0, 1):
        verdict = log.classify(checkpoint(10, part=part, parts=2))
    assert verdict is LogVerdict.DUPLICATE
    assert list(log.collected_blocks()) == []


def test_a_doubt_dates_from_its_first_sign(log):
    log.doubt(3.0)
    log.doubt(9.0)
    assert log.doubt_since_s == 3.0
