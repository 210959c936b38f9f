"""The event publisher over a transport that fails in every way a bus can."""

import asyncio

import pytest

from router.protocol.events import Checkpoint, EventBatch, decode_log_message
from router.protocol.values import SCHEME, Identity, Rank, Tier
from router.publisher import event_publisher
from router.publisher.event_publisher import KvEventPublisher
from router.publisher.journal.journal import EventJournal, JournalLimits
from router.runtime.bus.errors import BusUnavailableError, LogConflictError, LogFullError, TwinError
from support.fleets.memory_transport import MemoryTransport

SUBJECT, RANK = "kv.test.events.1.0", Rank(1, 0)


class FaultyTransport(MemoryTransport):
    """Fails as set: `before` the append, or `after` it, so that only the answer is lost."""

    def __init__(self):
        super().__init__()
        self.before, self.after = [], []

    async def append(self, subject, payload, **arguments):
        if self.before:
            raise self.before.pop(0)
        sequence = await super().append(subject, payload, **arguments)
        if self.after:
            raise self.after.pop(0)
        return sequence


async def no_other_owner():
    """The worker id is ours."""


@pytest.fixture
def transport(monkeypatch):
    monkeypatch.setattr(event_publisher, "_BACKOFF_S", (0.0,))
    return FaultyTransport()


def publisher(incarnation=1, **limits):
    journal = EventJournal(RANK, incarnation, Identity(SCHEME, 16), JournalLimits(**limits))
    return KvEventPublisher(journal, SUBJECT, flush_interval_s=0.001)


def logged(transport):
    return [decode_log_message(payload) for _, _, payload in transport.log]


async def test_starts_with_a_checkpoint_and_goes_on_with_batches(transport):
    ours = publisher()
    await ours.flush(transport, no_other_owner)
    ours.stored(Tier.DEVICE, [1, 2], None)
    await ours.flush(transport, no_other_owner)
    assert [type(m) for m in logged(transport)] == [Checkpoint, EventBatch]
    assert ours.published.event_id == 1
    assert ours.published.state.counts[0] == 2


async def test_a_checkpoint_replaces_history(transport):
    ours = publisher()
    for block in range(5):
        ours.stored(Tier.DEVICE, [block], None)
        await ours.flush(transport, no_other_owner)
    ours.require_checkpoint()
    await ours.flush(transport, no_other_owner)
    (only,) = logged(transport)
    assert (only.event_id, only.state.counts[0]) == (5, 5)


async def test_a_checkpoint_in_parts_replaces_history_too(transport):
    ours = publisher(checkpoint_part_blocks=2)
    ours.stored(Tier.DEVICE, [1, 2, 3, 4, 5], None)
    await ours.flush(transport, no_other_owner)
    ours.require_checkpoint()
    await ours.flush(transport, no_other_owner)
    assert [(m.part, m.parts) for m in logged(transport)] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("fault", [BusUnavailableError("down"), LogFullError(SUBJECT)])
@pytest.mark.parametrize("where", ["before", "after"])
async def test_nothing_is_lost_when_an_append_fails(transport, fault, where):
    ours = publisher()
    await ours.flush(transport, no_other_owner)
    getattr(transport, where).append(fault)
    ours.stored(Tier.DEVICE, [1], None)
    await ours.flush(transport, no_other_owner)
    last = logged(transport)[-1]
    assert isinstance(last, Checkpoint)
    assert last.state.counts[0] == 1
    assert ours.failures == 1
    ours.stored(Tier.DEVICE, [2], 1)
    await ours.flush(transport, no_other_owner)
    assert [type(m) for m in logged(transport)] == [Checkpoint, EventBatch]


async def test_a_fault_in_the_middle_of_parts_starts_them_over(transport):
    ours = publisher(checkpoint_part_blocks=1)
    ours.stored(Tier.DEVICE, [1, 2, 3], None)
    transport.after.append(BusUnavailableError("down"))
    await ours.flush(transport, no_other_owner)
    assert [(m.part, m.parts) for m in logged(transport)] == [(0, 3), (1, 3), (2, 3)]


async def test_published_state_is_the_acknowledged_one(transport):
    ours = publisher()
    await ours.flush(transport, no_other_owner)
    transport.before += [BusUnavailableError("down")]
    ours.stored(Tier.DEVICE, [1], None)
    seen = []

    async def verify():
        seen.append(ours.published.event_id)

    await ours.flush(transport, verify)
    assert seen == [0]
    assert ours.published.event_id == 1


async def test_a_lost_store_is_answered_with_a_checkpoint(transport):
    ours = publisher()
    ours.stored(Tier.DEVICE, [1], None)
    await ours.flush(transport, no_other_owner)
    transport.log.clear()
    ours.stored(Tier.DEVICE, [2], 1)
    await ours.flush(transport, no_other_owner)
    (only,) = logged(transport)
    assert (only.state.counts[0], only.event_id) == (2, 2)


async def test_twin_stops_the_publisher_that_lost_the_id(transport):
    ours, twin = publisher(incarnation=1), publisher(incarnation=2)
    await ours.flush(transport, no_other_owner)
    await twin.flush(transport, no_other_owner)
    ours.stored(Tier.DEVICE, [1], None)

    async def not_ours():
        raise TwinError("worker.1", "incarnation 2 has taken over")

    with pytest.raises(TwinError):
        await ours.flush(transport, not_ours)
    assert [m.incarnation for m in logged(transport)] == [2]


async def test_runs_until_cancelled_and_delivers_news_soon(transport, eventually):
    ours = publisher()
    task = asyncio.create_task(ours.run(transport, no_other_owner))
    await eventually(lambda: logged(transport))
    ours.stored(Tier.DEVICE, [1], None)
    await eventually(lambda: ours.published.event_id == 1)
    task.cancel()
    await asyncio.wait([task])


async def test_a_new_run_takes_the_log_over_again(transport, eventually):
    """Another connection to the bus: the log's position is unknown."""
    ours = publisher()
    await ours.flush(transport, no_other_owner)
    elsewhere = FaultyTransport()
    task = asyncio.create_task(ours.run(elsewhere, no_other_owner))
    ours.stored(Tier.DEVICE, [1], None)
    await eventually(lambda: elsewhere.log)
    task.cancel()
    assert isinstance(logged(elsewhere)[0], Checkpoint)


async def test_conflicts_are_faults_like_any(transport):
    ours = publisher()
    transport.before += [LogConflictError(SUBJECT, 3), LogConflictError(SUBJECT, 4)]
    await ours.flush(transport, no_other_owner)
    assert ours.failures == 2
    assert len(logged(transport)) == 1


class SmallTransport(MemoryTransport):
    """A log that refuses what would make it larger than `room_bytes`, whatever it would replace."""

    def __init__(self, room_bytes):
        super().__init__()
        self.room_bytes = room_bytes

    async def append(self, subject, payload, **arguments):
        if sum(len(kept) for _, _, kept in self.log) + len(payload) > self.room_bytes:
            raise LogFullError(subject)
        return await super().append(subject, payload, **arguments)


async def test_a_full_stream_is_given_room_by_our_own_history(monkeypatch):
    monkeypatch.setattr(event_publisher, "_BACKOFF_S", (0.0,))
    transport, ours = SmallTransport(1000), publisher()
    for block in range(40):
        ours.stored(Tier.DEVICE, [block], None)
        await ours.flush(transport, no_other_owner)
        assert logged(transport)[-1].state.counts[0] == block + 1
    assert ours.refusals > 0


async def test_a_stream_full_of_others_is_tried_until_there_is_room(monkeypatch, eventually):
    monkeypatch.setattr(event_publisher, "_BACKOFF_S", (0.001,))
    transport, ours = SmallTransport(1000), publisher()
    await transport.append("kv.test.events.2.0", bytes(990), expected_sequence=0)
    ours.stored(Tier.DEVICE, [1], None)
    task = asyncio.create_task(ours.flush(transport, no_other_owner))
    await eventually(lambda: ours.waiting_s > 0.04 and ours.refusals > 2)
    transport.log.clear()
    await task
    assert (ours.published.event_id, ours.waiting_s) == (1, 0.0)


async def test_waiting_time_counts_from_the_oldest_unpublished_change(transport):
    now_s = 10.0
    journal = EventJournal(RANK, 1, Identity(SCHEME, 16))
    ours = KvEventPublisher(journal, SUBJECT, flush_interval_s=0.001, clock=lambda: now_s)
    await ours.flush(transport, no_other_owner)
    assert ours.waiting_s == 0.0
    now_s = 11.0
    ours.stored(Tier.DEVICE, [1], None)
    now_s = 12.0
    ours.stored(Tier.DEVICE, [2], 1)
    assert ours.waiting_s == 1.0
    seen = []

    async def verify():
        ours.stored(Tier.DEVICE, [3], 2)
        seen.append(ours.waiting_s)

    transport.before += [BusUnavailableError("down")]
    now_s = 13.0
    await ours.flush(transport, verify)
    assert (seen, ours.waiting_s) == ([2.0], 0.0)


async def test_unchanged_state_has_no_waiting_time(transport):
    ours = publisher()
    ours.stored(Tier.DEVICE, [1], None)
    await ours.flush(transport, no_other_owner)
    ours.stored(Tier.DEVICE, [1], None)
    assert ours.waiting_s == 0.0


@pytest.mark.parametrize(("workers", "window_s"), [(0, 0.02), (80, 0.02), (400, 0.1), (9999, 0.5)])
def test_events_of_larger_fleets_travel_together_for_longer(workers, window_s):
    assert event_publisher.flush_window_s(workers) == pytest.approx(window_s)


async def test_new_life_during_a_publish_replaces_the_old_one(transport):
    ours = publisher()
    ours.stored(Tier.DEVICE, [1, 2], None)
    lives = []

    class Slow(FaultyTransport):
        async def append(self, subject, payload, **arguments):
            if not lives:
                lives.append(2)
                ours.new_life(2)
            published.append((ours.incarnation, ours.published.event_id))
            return await super().append(subject, payload, **arguments)

    published, slow = [], Slow()
    await ours.flush(slow, no_other_owner)
    assert published == [(2, 0), (2, 0)]
    assert [(m.incarnation, m.state.counts[0]) for m in logged(slow)] == [(2, 0)]
    assert (ours.published.event_id, ours.waiting_s) == (0, 0.0)
