"""What a rank has to say next."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.protocol.events import Checkpoint, Cleared, EventBatch, Removed, Stored
from router.protocol.values import SCHEME, Identity, Rank, Tier, unpack_hashes
from router.publisher.journal import EventJournal, JournalLimits

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


def test_what_came_before_the_first_checkpoint_is_in_it():
    early = journal()
    early.stored(Tier.DEVICE, [1, 2], None)
    (first,) = early.take()
    assert [hashes(blocks) for blocks in first.blocks] == [[1, 2]]
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


def test_what_changes_nothing_is_no_event():
    one = started()
    one.stored(Tier.DEVICE, [1], None)
    one.take()
    one.stored(Tier.DEVICE, [1], None)
    one.removed(Tier.DEVICE, [2])
    assert not one.has_news
    assert one.take() == []


def test_a_batch_says_what_is_held_after_it():
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
    assert {b.tier: hashes(b) for b in checkpoint.blocks} == {Tier.DEVICE: [1, 2], Tier.HOST: [1]}
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
    assert hashes(checkpoint.blocks[0]) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


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
    assert [h for p in parts for b in p.blocks for h in hashes(b)] == [*range(10), 0]
    assert len({p.state for p in parts}) == 1


def test_events_stay_small():
    one = started(event_blocks=3)
    one.stored(Tier.DEVICE, list(range(8)), None)
    (batch,) = one.take()
    assert [len(hashes(event)) for event in batch.events] == [3, 3, 2]


changes = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "cleared", "take", "checkpoint"]),
        st.sampled_from(Tier),
        st.integers(0, 9),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(changes)
def test_the_log_always_adds_up_to_what_is_held(steps):
    """Whatever is noted, whenever it is taken: replaying the log gives what is held."""
    one = journal(
        event_blocks=2, batch_blocks=6, batch_events=4, checkpoint_part_blocks=3, tail_blocks=5
    )
    replayed = {tier: set() for tier in Tier}
    for step, tier, block in [*steps, ("take", None, None)]:
        match step:
            case "stored":
                one.stored(tier, [block], block - 1 if block else None)
            case "removed":
                one.removed(tier, [block])
            case "cleared":
                one.cleared(tier)
            case "checkpoint":
                one.require_checkpoint()
            case "take":
                _replay(replayed, one.take())
                assert all(set(one.held(t).tolist()) == replayed[t] for t in Tier)


def _replay(replayed, messages):
    for message in messages:
        if isinstance(message, Checkpoint):
            _replace(replayed, message)
        else:
            for event in message.events:
                _change(replayed, event)


def _replace(replayed, checkpoint):
    for blocks in replayed.values() if checkpoint.part == 0 else ():
        blocks.clear()
    for held in checkpoint.blocks:
        replayed[held.tier].update(hashes(held))


def _change(replayed, event):
    match event:
        case Stored():
            replayed[event.tier].update(hashes(event))
        case Removed():
            replayed[event.tier].difference_update(hashes(event))
        case Cleared(tier):
            for each in Tier if tier is None else (tier,):
                replayed[each].clear()
