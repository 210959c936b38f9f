"""From the steps of an engine's log to a rank's journal."""

import msgspec
import pytest

from router.protocol.values import Doubt, Rank, Tier
from router.publisher.batch_order.steps import Apply, Lost, NewLife
from router.publisher.feed.engine_feed import STATE_BATCHES, EngineFeed
from router.publisher.feed.log_limiter import LogLimiter
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer import engine_map
from router.publisher.normalizer.normalizer import Normalizer
from support.engines.engines import IDENTITY, names
from support.engines.zmq_engines import cleared, removed, stored

TOKENS = list(range(8))


class Feeding:
    def __init__(self):
        self.journal = EventJournal(Rank(7, 1), 50, IDENTITY)
        self.normalizer = Normalizer(self.journal, IDENTITY)
        self.feed = EngineFeed(self.journal, self.normalizer, 1)
        self.journal.take()

    def take(self, *steps, now_s=0.0):
        self.feed.take(steps, now_s)

    @property
    def held(self):
        return set(self.journal.held(Tier.DEVICE).tolist())


@pytest.fixture
def feeding():
    return Feeding()


def apply(sequence, *events, dp_rank=1):
    return Apply(sequence, msgspec.msgpack.encode([1.5, list(events), dp_rank]))


def test_batches_become_events(feeding):
    feeding.take(apply(0, stored([11, 12], TOKENS)))
    assert feeding.held == set(names(TOKENS))
    feeding.take(apply(1, removed([12])))
    assert feeding.held == set(names(TOKENS)[:1])
    assert feeding.feed.counters.applied == 2
    assert feeding.feed.take_complaints(0.0) == ()


def test_a_new_life_is_a_new_incarnation_that_knows_nothing(feeding):
    feeding.take(apply(0, stored([11], TOKENS[:4])), NewLife("why"), apply(0, removed([11])))
    assert feeding.held == set()
    assert feeding.journal.incarnation == 51
    assert feeding.journal.state.doubts == 0
    assert feeding.feed.take_complaints(0.0) == ["the engine began a new life: why"]


def test_loss_without_held_blocks_is_published_as_a_doubt(feeding):
    assert not feeding.journal.has_news
    feeding.take(Lost(0, None, "gone"))
    assert feeding.journal.state.doubts == Doubt.EVENTS_LOST
    assert feeding.journal.has_news
    feeding.take(NewLife("whole again"))
    assert feeding.journal.state.doubts == 0


def test_an_unreadable_payload_is_counted_and_doubted(feeding):
    feeding.take(Apply(0, b"\xc1"), apply(1, stored([11], TOKENS[:4])))
    assert feeding.feed.counters.unreadable == 1
    assert feeding.journal.state.doubts == Doubt.UNREADABLE
    assert len(feeding.held) == 1
    assert len(feeding.feed.take_complaints(0.0)) == 1


def test_bad_and_unknown_events_are_dropped_alone(feeding):
    feeding.take(
        apply(0, {"type": "Odd"}, {"type": "BlockStored"}, stored([11], TOKENS[:4])),
        apply(1, {"type": "Odd"}),
    )
    assert feeding.feed.counters.dropped_events == 3
    assert len(feeding.held) == 1
    assert len(feeding.feed.take_complaints(0.0)) == 3


def test_unknown_field_is_logged_once_and_a_problem_while_it_is_a_doubt(feeding):
    field = "events carry the field `tenant` of BlockStored, which this version does not know"
    for number in range(5):
        feeding.take(apply(number, stored([11 + number], TOKENS[:4], tenant="a")))
    feeding.take(apply(5, {"type": "Odd"}))
    assert feeding.journal.state.doubts == Doubt.UNKNOWN_FIELDS
    logged = feeding.feed.take_complaints(0.0)
    assert len(logged) == 2
    assert logged[0].startswith(f"batch 0: {field}")
    assert feeding.feed.problem.startswith(f"events of type 'Odd' are dropped; {field}")
    feeding.take(apply(6, cleared()))
    assert feeding.journal.state.doubts == 0
    assert feeding.feed.problem == "events of type 'Odd' are dropped"


def test_unknown_field_of_another_rank_is_no_doubt(feeding):
    feeding.take(apply(0, stored([11], TOKENS[:4], tenant="a"), dp_rank=3))
    assert feeding.journal.state.doubts == 0
    assert "tenant" not in feeding.feed.problem


def test_batches_of_other_ranks_are_dropped(feeding):
    feeding.take(apply(0, stored([11], TOKENS[:4]), dp_rank=3))
    assert (feeding.feed.counters.foreign, feeding.held) == (1, set())
    feeding.take(apply(1, stored([11], TOKENS[:4]), dp_rank=None))
    assert len(feeding.held) == 1


def test_a_state_is_due_after_many_batches_and_brings_another_feed_there(feeding):
    feeding.take(apply(0, stored([11, 12], TOKENS)))
    feeding.take(*(apply(n) for n in range(1, STATE_BATCHES)))
    assert feeding.feed.is_state_due
    saved = b"".join(feeding.feed.save())
    assert not feeding.feed.is_state_due
    other = Feeding()
    other.normalizer.load(saved, 0.0)
    other.take(apply(9, removed([11])))
    assert other.held == set(names(TOKENS)[1:])


def test_complaints_are_few():
    complaints = LogLimiter(interval_s=5.0, at_most=2)
    for number in range(5):
        complaints.add(f"{number}")
    assert complaints.take(0.0) == ["0", "1", "and 3 more like these"]
    complaints.add("5")
    assert complaints.take(4.9) == ()
    assert complaints.take(5.0) == ["5"]
    assert complaints.take(99.0) == ()


def test_a_long_batch_is_carried_out_in_slices(feeding):
    hashes, tokens = list(range(1, 1_501)), list(range(6_000))
    steps = [
        apply(0, stored(hashes, tokens)),
        *(apply(number, removed([number])) for number in range(1, 101)),
    ]
    held, ended = [], []
    for each in feeding.feed.slices(steps, lambda: 0.0):
        held.append(len(feeding.held))
        ended.append(each)
    assert held[0] == 1024
    assert ended[0] == 0
    assert sum(ended) == len(steps)
    assert max(ended) < 70
    assert len(feeding.held) == 1_400


def test_many_batches_without_blocks_are_carried_out_in_slices(feeding):
    ended = list(feeding.feed.slices([apply(n) for n in range(100)], lambda: 0.0))
    assert sum(ended) == 100
    assert max(ended) < 70


def test_a_large_cache_is_cleared_in_slices(feeding, monkeypatch):
    monkeypatch.setattr(engine_map, "_CLEARED_ROWS", 100)
    hashes, tokens = list(range(1, 1_001)), list(range(4_000))
    feeding.take(apply(0, stored(hashes, tokens)))
    steps = [apply(1, removed([7]), cleared(), stored([1], TOKENS[:4]))]
    ended = list(feeding.feed.slices(steps, lambda: 0.0))
    assert len(ended) >= 5
    assert sum(ended) == 1
    assert feeding.held == {names(TOKENS)[0]}
    feeding.normalizer.check_invariants()
