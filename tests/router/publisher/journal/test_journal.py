"""What a rank has to say next."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router.protocol.events import Checkpoint, Cleared, EventBatch, Removed, Stored
from router.protocol.values import (
    SCHEME,
    Doubt,
    HeldState,
    Identity,
    Rank,
    Tier,
    unpack_hashes,
)
from router.publisher.journal.journal import EventJournal, JournalLimits
from support.chaos.fuzzing import examples

RANK, IDENTITY = Rank(7, 1), Identity(SCHEME, 16)


def journal(**limits):
    return EventJournal(RANK, 99, IDENTITY, JournalLimits(**limits))


def started(**limits):
    started = journal(**limits)
    started.take()
    return started


def hashes(event):
    return unpack_hashes(event.sequence_hashes).tolist()


def test_begins_with_a_checkpoint():
    (first,) = journal().take()
    assert isinstance(first, Checkpoint)
    assert (first.rank, first.incarnation, first.event_id) == (RANK, 99, 0)
    assert first.blocks == ()


def test_first_checkpoint_includes_earlier_changes():
    early = journal()
    early.stored(Tier.DEVICE, [1, 2], None)
    (first,) = early.take()
    assert [sorted(hashes(blocks)) for blocks in first.blocks] == [[1, 2]]
    assert first.event_id == 1
    assert not early.has_news


def test_coalesces_changes_of_a_kind_and_keeps_their_order():
    one = started()
    one.stored(Tier.DEVICE, [1], None)
    one.stored(Tier.DEVICE, [2], 1)
    one.removed(Tier.DEVICE, [2])
    one.stored(Tier.HOST, [2], 1)
    (batch,) = one.take()
    assert [(type(e), e.tier, hashes(e)) for e in batch.events] == [
        (Stored, Tier.DEVICE, [1, 2]),
        (Removed, Tier.DEVICE, [2]),
        (Stored, Tier.HOST, [2]),
    ]
    assert (batch.first_event_id, batch.last_event_id, one.last_event_id) == (1, 3, 3)


def test_ids_go_on_where_they_stopped():
    one = started()
    for number in (1, 2):
        one.stored(Tier.DEVICE, [number], None)
        (batch,) = one.take()
        assert batch.first_event_id == number


def test_unchanged_blocks_are_no_event():
    one = started()
    one.stored(Tier.DEVICE, [1], None)
    one.take()
    one.stored(Tier.DEVICE, [1], None)
    one.removed(Tier.DEVICE, [2])
    assert not one.has_news
    assert one.take() == []


def test_batch_carries_the_state_after_it():
    one = started()
    one.stored(Tier.DEVICE, [1, 2, 3], None)
    one.removed(Tier.DEVICE, [2])
    (batch,) = one.take()
    assert (batch.state.counts[0], batch.state.holes[0]) == (2, 1)
    assert one.taken_state == batch.state


def test_clearing_supersedes_what_was_noted():
    one = started()
    one.stored(Tier.DEVICE, [1, 2], None)
    one.cleared()
    (batch,) = one.take()
    assert batch.events == (Cleared(None),)
    assert batch.state.counts == (0, 0, 0, 0)


def test_a_required_checkpoint_carries_everything():
    one = started()
    one.stored(Tier.DEVICE, [1, 2], None)
    one.take()
    one.stored(Tier.HOST, [1], None)
    one.require_checkpoint()
    (checkpoint,) = one.take()
    held = {blocks.tier: sorted(hashes(blocks)) for blocks in checkpoint.blocks}
    assert held == {Tier.DEVICE: [1, 2], Tier.HOST: [1]}
    assert checkpoint.event_id == 2


def test_a_log_that_outgrows_what_it_describes_is_replaced():
    one = started(tail_blocks=8)
    for round_number in range(4):
        one.stored(Tier.DEVICE, [round_number], None)
        one.removed(Tier.DEVICE, [round_number])
        assert isinstance(one.take()[0], EventBatch)
    one.stored(Tier.DEVICE, [9], None)
    assert isinstance(one.take()[0], Checkpoint)
    one.removed(Tier.DEVICE, [9])
    assert isinstance(one.take()[0], EventBatch)


def test_a_log_as_long_as_what_it_describes_is_kept():
    one = started(tail_blocks=2)
    for number in range(20):
        one.stored(Tier.DEVICE, [number], number - 1 if number else None)
        assert isinstance(one.take()[0], EventBatch)


def test_more_than_a_batch_can_carry_becomes_a_checkpoint():
    one = started(batch_blocks=5)
    one.stored(Tier.DEVICE, list(range(10)), None)
    one.removed(Tier.DEVICE, [3])
    (checkpoint,) = one.take()
    assert sorted(hashes(checkpoint.blocks[0])) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_more_events_than_a_batch_can_carry_become_a_checkpoint():
    one = started(batch_events=3)
    for number in range(10):
        one.stored(Tier.DEVICE, [number], None)
        one.removed(Tier.DEVICE, [number])
    (checkpoint,) = one.take()
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.blocks == ()


def test_a_large_checkpoint_comes_in_parts():
    one = started(checkpoint_part_blocks=4)
    one.stored(Tier.DEVICE, list(range(10)), None)
    one.stored(Tier.HOST, [0], None)
    one.require_checkpoint()
    parts = one.take()
    assert [(p.part, p.parts) for p in parts] == [(0, 3), (1, 3), (2, 3)]
    reported = [(b.tier, h) for p in parts for b in p.blocks for h in hashes(b)]
    assert sorted(reported) == [*((Tier.DEVICE, h) for h in range(10)), (Tier.HOST, 0)]
    assert [sum(len(hashes(b)) for b in p.blocks) for p in parts] == [4, 4, 3]
    assert len({p.state for p in parts}) == 1


def test_events_stay_small():
    one = started(event_blocks=3)
    one.stored(Tier.DEVICE, list(range(8)), None)
    (batch,) = one.take()
    assert [len(hashes(event)) for event in batch.events] == [3, 3, 2]


def test_store_and_remove_return_changed_blocks():
    one = started()
    assert one.stored(Tier.DEVICE, [1, 2], None).tolist() == [1, 2]
    assert one.stored(Tier.DEVICE, np.array([1, 2, 3], np.uint64), None).tolist() == [3]
    assert one.removed(Tier.DEVICE, [3, 4]).tolist() == [3]


def test_clearing_what_is_empty_is_no_event():
    one = started()
    one.cleared()
    assert not one.has_news
    one.stored(Tier.HOST, [1], None)
    one.cleared(Tier.DEVICE)
    (batch,) = one.take()
    assert [type(event) for event in batch.events] == [Stored]


def test_clearing_a_tier_keeps_its_place():
    one = started()
    one.stored(Tier.DEVICE, [1], None)
    one.cleared(Tier.DEVICE)
    one.stored(Tier.DEVICE, [2], None)
    (batch,) = one.take()
    assert [type(event) for event in batch.events] == [Stored, Cleared, Stored]


def test_oversized_batch_skips_its_ids():
    """No two states are known by one id: what only a checkpoint says has an id too."""
    one = started(batch_blocks=5)
    one.stored(Tier.DEVICE, [1], None)
    one.stored(Tier.DEVICE, list(range(10, 20)), None)
    (checkpoint,) = one.take()
    assert checkpoint.event_id == 2
    one.stored(Tier.DEVICE, [2], None)
    (batch,) = one.take()
    assert batch.first_event_id == 3


def test_more_bytes_than_a_batch_can_carry_become_a_checkpoint():
    one = started(batch_bytes=80)
    one.stored(Tier.DEVICE, [1, 2, 3], None)
    assert isinstance(one.take()[0], EventBatch)
    one.stored(Tier.DEVICE, list(range(10, 20)), None)
    assert isinstance(one.take()[0], Checkpoint)


def test_doubts_are_part_of_every_state_and_no_news():
    one = started()
    one.set_doubts(Doubt.ORPHANS)
    assert not one.has_news
    assert one.state.doubts == Doubt.ORPHANS
    assert one.taken_state.doubts == 0
    one.stored(Tier.DEVICE, [1], None)
    (batch,) = one.take()
    assert batch.state.doubts == one.taken_state.doubts == Doubt.ORPHANS
    one.require_checkpoint()
    assert one.take()[0].state.doubts == Doubt.ORPHANS
    one.set_doubts(0)
    assert one.state == HeldState(counts=(1, 0, 0, 0), digests=one.state.digests)


def test_a_new_life_begins_with_nothing():
    one = started()
    one.stored(Tier.DEVICE, [1, 2], None)
    one.take()
    one.stored(Tier.DEVICE, [3], None)
    one.new_life(100)
    assert (one.incarnation, one.last_event_id, one.taken_state) == (100, 0, HeldState())
    (checkpoint,) = one.take()
    assert (checkpoint.incarnation, checkpoint.event_id, checkpoint.blocks) == (100, 0, ())
    one.stored(Tier.DEVICE, [4], None)
    (batch,) = one.take()
    assert (batch.incarnation, batch.first_event_id) == (100, 1)


def test_sealed_events_are_not_added_to_nor_dropped():
    one = started()
    one.stored(Tier.DEVICE, [1], None)
    one.seal()
    one.stored(Tier.DEVICE, [2], 1)
    one.cleared()
    (batch,) = one.take()
    assert [hashes(event) for event in batch.events[:1]] == [[1]]
    assert batch.events[1:] == (Cleared(None),)


def test_a_dump_is_what_is_held_now_and_leaves_the_log_alone():
    one = started()
    one.stored(Tier.DEVICE, [1, 2], None)
    (dump,) = one.dump()
    assert (dump.event_id, sorted(hashes(dump.blocks[0])), dump.state) == (1, [1, 2], one.state)
    assert one.last_event_id == 0
    one.stored(Tier.DEVICE, [3], 2)
    (batch,) = one.take()
    assert [hashes(event) for event in batch.events] == [[1, 2], [3]]


changes = st.lists(
    st.tuples(
        st.sampled_from(
            ["stored", "removed", "cleared", "take", "require_checkpoint", "seal", "dump"]
        ),
        st.sampled_from(Tier),
        st.integers(0, 9),
        st.integers(1, 4),
    ),
    max_size=60,
)


@settings(max_examples=examples(150))
@given(changes)
def test_the_log_always_adds_up_to_what_is_held(steps):
    """Whatever is noted, whenever it is taken: replaying the log gives what is held, and what a
    dump said was held after an event is what the log says of it.
    """
    one = journal(
        event_blocks=2, batch_blocks=6, batch_events=4, checkpoint_part_blocks=3, tail_blocks=5
    )
    log = Replayed()
    for step, tier, block, length in [*steps, ("take", None, None, None)]:
        match step:
            case "stored":
                one.stored(tier, range(block, block + length), block - 1 if block else None)
            case "removed":
                one.removed(tier, range(block, block + length))
            case "cleared":
                one.cleared(tier if length > 1 else None)
            case "dump":
                log.note_dump(one.dump())
            case "take":
                log.read(one.take())
                assert log.last_event_id == one.last_event_id
                assert all(set(one.held(t).tolist()) == log.held[t] for t in Tier)
            case _:
                getattr(one, step)()
        one.recent.check_invariants()


class Replayed:
    """What the log adds up to."""

    def __init__(self):
        self.held = {tier: set() for tier in Tier}
        self.dumps = {}
        self.last_event_id = 0

    def note_dump(self, parts):
        dumped = {tier: set() for tier in Tier}
        for held in (blocks for part in parts for blocks in part.blocks):
            dumped[held.tier].update(hashes(held))
        assert self.dumps.setdefault(parts[0].event_id, dumped) == dumped

    def read(self, messages):
        for message in messages:
            if isinstance(message, Checkpoint):
                self.replace(message)
            else:
                assert message.first_event_id == self.last_event_id + 1
                for event in message.events:
                    self.change(event)
                    self.advance(self.last_event_id + 1)
                assert message.last_event_id == self.last_event_id
        if messages and isinstance(messages[-1], Checkpoint):
            self.advance(messages[-1].event_id)

    def advance(self, event_id):
        self.last_event_id = event_id
        assert self.dumps.get(event_id, self.held) == self.held

    def replace(self, checkpoint):
        assert checkpoint.event_id >= self.last_event_id
        for blocks in self.held.values() if checkpoint.part == 0 else ():
            blocks.clear()
        for held in checkpoint.blocks:
            self.held[held.tier].update(hashes(held))

    def change(self, event):
        match event:
            case Stored():
                self.held[event.tier].update(hashes(event))
            case Removed():
                self.held[event.tier].difference_update(hashes(event))
            case Cleared(tier):
                for each in Tier if tier is None else (tier,):
                    self.held[each].clear()
