"""Answers of a rank, against a list of all that ever happened to it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.protocol.events import Checkpoint, Cleared, Removed, Stored
from router.protocol.ranges import Events, InvalidRange, RangeRequest, TooNew
from router.protocol.values import SCHEME, Doubt, Identity, Rank, Tier, unpack_hashes
from router.publisher.journal.journal import EventJournal, JournalLimits
from router.publisher.rank_queries import LocalIndex
from support.chaos.fuzzing import examples

RANK, IDENTITY = Rank(7, 1), Identity(SCHEME, 16)


class Asked:
    """A rank that can be changed and asked."""

    def __init__(self, **limits):
        self.journal = EventJournal(RANK, 99, IDENTITY, JournalLimits(**limits))
        self.index = LocalIndex(self.journal)
        self.journal.take()

    def ask(self, start=None, end=None):
        return self.index.answer(RangeRequest(start, end))

    def happen(self, count):
        """Make `count` events of a block each."""
        for number in range(count):
            self.journal.stored(Tier.DEVICE, [number], None)
            self.journal.take()


def reported(answer):
    """Ids and hashes of an answer with events."""
    hashes = [unpack_hashes(event.sequence_hashes).tolist() for event in answer.events]
    return answer.first_event_id, answer.last_event_id, hashes


def test_range_returns_events_from_its_start():
    rank = Asked()
    rank.happen(5)
    (answer,) = rank.ask(3)
    assert reported(answer) == (3, 5, [[2], [3], [4]])
    assert (answer.incarnation, answer.identity) == (99, IDENTITY)


def test_the_end_is_included_and_clamped():
    rank = Asked()
    rank.happen(5)
    assert reported(rank.ask(2, 3)[0])[:2] == (2, 3)
    assert reported(rank.ask(5, 5)[0])[:2] == (5, 5)
    assert reported(rank.ask(4, 99)[0])[:2] == (4, 5)


def test_range_without_a_start_returns_a_checkpoint():
    rank = Asked()
    rank.happen(3)
    rank.journal.set_doubts(Doubt.HYBRID)
    (answer,) = rank.ask()
    assert isinstance(answer, Checkpoint)
    assert (answer.rank, answer.incarnation, answer.event_id) == (RANK, 99, 3)
    assert sorted(unpack_hashes(answer.blocks[0].sequence_hashes).tolist()) == [0, 1, 2]
    assert answer.state.doubts == Doubt.HYBRID
    assert isinstance(rank.ask(None, 2)[0], Checkpoint)


def test_range_before_any_event_returns_an_empty_checkpoint():
    (answer,) = Asked().ask(1)
    assert isinstance(answer, Checkpoint)
    assert (answer.event_id, answer.blocks) == (0, ())


def test_range_older_than_recent_events_returns_a_checkpoint():
    rank = Asked(recent_events=4)
    rank.happen(6)
    assert isinstance(rank.ask(2)[0], Checkpoint)
    assert reported(rank.ask(3)[0])[:2] == (3, 6)
    assert isinstance(rank.ask(0, 6)[0], Checkpoint)


def test_future_range_is_too_new():
    rank = Asked()
    rank.happen(5)
    assert rank.ask(6) == [TooNew(99, 6, None, 5)]
    assert rank.ask(7, 9) == [TooNew(99, 7, 9, 5)]


def test_an_end_before_the_start_is_no_range():
    assert Asked().ask(6, 5) == [InvalidRange(6, 5)]


def test_range_includes_unpublished_events():
    rank = Asked()
    rank.happen(1)
    rank.journal.stored(Tier.DEVICE, [8], None)
    assert reported(rank.ask(2)[0]) == (2, 2, [[8]])
    rank.journal.stored(Tier.DEVICE, [9], None)
    assert reported(rank.ask(2)[0]) == (2, 3, [[8], [9]])
    (batch,) = rank.journal.take()
    assert (batch.first_event_id, batch.last_event_id) == (2, 3)


def test_events_within_a_checkpoint_are_kept():
    rank = Asked()
    rank.journal.stored(Tier.DEVICE, [1], None)
    rank.journal.require_checkpoint()
    assert isinstance(rank.journal.take()[0], Checkpoint)
    assert reported(rank.ask(1)[0]) == (1, 1, [[1]])


def test_range_over_an_oversized_batch_returns_a_checkpoint():
    rank = Asked(batch_blocks=4)
    rank.happen(2)
    rank.journal.stored(Tier.DEVICE, list(range(10, 20)), None)
    (answer,) = rank.ask(1)
    assert (answer.event_id, answer.state.counts[0]) == (3, 12)
    rank.journal.stored(Tier.DEVICE, [30], None)
    assert reported(rank.ask(4)[0]) == (4, 4, [[30]])


def test_many_bytes_push_old_events_out():
    rank = Asked(recent_bytes=8 * 9, event_blocks=2)
    rank.journal.stored(Tier.DEVICE, list(range(12)), None)
    rank.journal.take()
    assert isinstance(rank.ask(3)[0], Checkpoint)
    assert reported(rank.ask(4)[0]) == (4, 6, [[6, 7], [8, 9], [10, 11]])


def test_large_checkpoint_is_sent_in_parts():
    rank = Asked(checkpoint_part_blocks=4)
    rank.journal.stored(Tier.DEVICE, list(range(10)), None)
    assert [(part.part, part.parts) for part in rank.ask()] == [(0, 3), (1, 3), (2, 3)]


def test_a_new_life_forgets_the_old():
    rank = Asked()
    rank.happen(5)
    rank.journal.new_life(100)
    assert isinstance(rank.ask(3)[0], Checkpoint)
    rank.happen(1)
    assert rank.ask(3) == [TooNew(100, 3, None, 1)]


LIMITS = JournalLimits(
    event_blocks=2, batch_events=6, batch_blocks=7, checkpoint_part_blocks=3, tail_blocks=5,
    recent_events=5, recent_bytes=8 * 11,
)  # fmt: skip
tiers = st.sampled_from(Tier)
event_ids = st.none() | st.integers(0, 60)


class AgainstHistory(RuleBasedStateMachine):
    """Every answer, in any order with changes and messages, fits one history of sets by event id.

    Messages and answers write that history down, each for itself: the first entry is compared
    with all later ones.
    """

    def __init__(self):
        super().__init__()
        self.held = {tier: set() for tier in Tier}
        self.journal = EventJournal(RANK, 1, IDENTITY, LIMITS)
        self.index = LocalIndex(self.journal)
        self.states, self.events = {}, {}

    @rule(tier=tiers, start=st.integers(0, 15), length=st.integers(1, 5))
    def store(self, tier, start, length):
        blocks = range(start, start + length)
        new = self.journal.stored(tier, blocks, start - 1 if start else None)
        assert new.tolist() == [block for block in blocks if block not in self.held[tier]]
        self.held[tier].update(blocks)

    @rule(tier=tiers, blocks=st.lists(st.integers(0, 19), max_size=5, unique=True))
    def remove(self, tier, blocks):
        gone = self.journal.removed(tier, blocks)
        assert gone.tolist() == [block for block in blocks if block in self.held[tier]]
        self.held[tier].difference_update(blocks)

    @rule(tier=st.none() | tiers)
    def clear(self, tier):
        self.journal.cleared(tier)
        for each in Tier if tier is None else (tier,):
            self.held[each].clear()

    @rule()
    def require_checkpoint(self):
        self.journal.require_checkpoint()

    @rule()
    def new_life(self):
        self.journal.new_life(self.journal.incarnation + 1)
        self.held = {tier: set() for tier in Tier}
        self.states, self.events = {}, {}

    @rule()
    def take(self):
        messages = self.journal.take()
        for message in messages:
            if not isinstance(message, Checkpoint):
                self.note_events(message)
        if messages and isinstance(messages[0], Checkpoint):
            self.note_parts(messages)
        if messages:
            self.note_state(self.journal.last_event_id, self.held)

    @rule(start=event_ids, end=event_ids)
    def ask(self, start, end):
        answers = self.index.answer(RangeRequest(start, end))
        match answers[0]:
            case InvalidRange(first, last):
                assert (start, end) == (first, last)
                assert last < first
            case TooNew(incarnation, first, last, newest):
                assert incarnation == self.journal.incarnation
                assert (start, end) == (first, last)
                assert newest < first
                self.note_state(newest, self.held)
            case Events() as events:
                assert events.first_event_id == start
                assert end is None or events.last_event_id <= end
                self.note_events(events)
                if end is None:
                    self.note_state(events.last_event_id, self.held)
            case Checkpoint():
                assert start is None or start not in self.kept()
                self.note_parts(answers)
                self.note_state(answers[0].event_id, self.held)

    @invariant()
    def adds_up(self):
        """From any published state, published events lead to the next published state."""
        for event_id in self.states.keys() & {event_id - 1 for event_id in self.events}:
            state = apply(self.states[event_id], self.events[event_id + 1])
            assert self.states.setdefault(event_id + 1, state) == state
        self.journal.recent.check_invariants()

    def kept(self):
        recent = self.journal.recent
        return range(recent.first_event_id, recent.last_event_id + 1)

    def note_events(self, reported):
        for event_id, event in enumerate(reported.events, reported.first_event_id):
            assert self.events.setdefault(event_id, event) == event

    def note_parts(self, parts):
        assert [(part.part, part.parts) for part in parts] == [
            (number, len(parts)) for number in range(len(parts))
        ]
        held = {tier: set() for tier in Tier}
        for blocks in (blocks for part in parts for blocks in part.blocks):
            held[blocks.tier].update(unpack_hashes(blocks.sequence_hashes).tolist())
        self.note_state(parts[0].event_id, held)

    def note_state(self, event_id, held):
        state = {tier: frozenset(blocks) for tier, blocks in held.items()}
        assert self.states.setdefault(event_id, state) == state


def apply(state, event):
    match event:
        case Cleared(None):
            return dict.fromkeys(Tier, frozenset())
        case Cleared(tier):
            return {**state, tier: frozenset()}
        case Stored(tier, packed):
            return {**state, tier: state[tier] | set(unpack_hashes(packed).tolist())}
        case Removed(tier, packed):
            return {**state, tier: state[tier] - set(unpack_hashes(packed).tolist())}


AgainstHistory.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=40)
TestAgainstHistory = AgainstHistory.TestCase
