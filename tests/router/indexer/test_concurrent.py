"""The index in shards, changed by threads, against its definition."""

import subprocess
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import structs

from oracle.index import ExactIndex
from router.errors import WireError
from router.indexer.base import DONE, NOTHING_HELD, HeldSummary, Overlap
from router.indexer.concurrent import ConcurrentIndex
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.events import (
    ClassCleared,
    ClassRemoved,
    ClassStored,
    Cleared,
    EventBatch,
    Removed,
    Stored,
    pack_batch,
)
from router.protocol.hybrid import HybridState, LayerClass, Layout
from router.protocol.values import (
    SCHEME,
    HeldState,
    Identity,
    Rank,
    Tier,
    pack_hashes,
    unpack_hashes,
)
from router.sequence.hashing.block_hashes import chain
from support.chaos.fuzzing import examples
from support.processes.servers import until

W1, W2, W3 = Rank(1, 0), Rank(2, 0), Rank(3, 0)
DEVICE, HOST = Tier.DEVICE, Tier.HOST
IDENTITY, UNKNOWN_HOLES = Identity(SCHEME, 16), (1, 1, 1, 1)
SOMETHING = HeldSummary((7, 0, 0, 0), (7, 0, 0, 0))


def array(*hashes):
    return np.array(hashes, dtype=np.uint64)


def small_tree():
    return RadixTree(1 << 12, sub_bits=4)


def shard_threads():
    return [thread for thread in threading.enumerate() if thread.name == "index-shard"]


def contents(index):
    return {(each.rank, each.tier): sorted(each.sequence_hashes.tolist()) for each in index.dump()}


@pytest.fixture
def start():
    """Starts indexes, and closes them at the end of the test."""
    started = []

    def start(make_index=ExactIndex, shards=2, **arguments):
        started.append(ConcurrentIndex(make_index, shards, **arguments))
        return started[-1]

    yield start
    for index in started:
        with suppress(RuntimeError):
            index.close()
    assert not shard_threads()


@pytest.fixture
def parts():
    """The indexes that `ExactIndex` was asked for, in order."""
    return []


@pytest.fixture
def sharded(start, parts):
    def make_index():
        parts.append(ExactIndex())
        return parts[-1]

    return start(make_index, shards=2)


def shards_of(parts, rank):
    return [i for i, part in enumerate(parts) if part.summary(rank) != NOTHING_HELD]


ranks = st.builds(Rank, st.integers(0, 5), st.integers(0, 1))
tiers = st.sampled_from(Tier)
blocks = st.lists(st.integers(0, 12), max_size=8)
changes = st.builds(
    lambda kind, tier, hashes: kind(tier, pack_hashes(array(*hashes))),
    st.sampled_from([Stored, Removed]),
    tiers,
    blocks,
)
events = changes | st.builds(Cleared, st.none() | tiers)


def batch_of(rank, events, counts=(7, 0, 0, 0), digests=(7, 0, 0, 0)):
    packed = pack_batch(HeldState(UNKNOWN_HOLES, counts, digests), events)
    return EventBatch(rank.worker_id, rank.dp_rank, 1, IDENTITY, 1, len(events), packed)


class AgainstTheOracle(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = ConcurrentIndex(small_tree, shards=4, queue_limit=4)
        self.oracle = ExactIndex()

    def both(self, method, *arguments):
        for index in (self.index, self.oracle):
            getattr(index, method)(*arguments)

    @rule(rank=ranks, tier=tiers, hashes=blocks, method=st.sampled_from(["store", "remove"]))
    def change(self, rank, tier, hashes, method):
        self.both(method, rank, tier, array(*hashes))

    @rule(rank=ranks, tier=st.none() | tiers)
    def clear(self, rank, tier):
        self.both("clear", rank, tier)

    @rule(rank=ranks, tier=tiers, hashes=blocks)
    def stage(self, rank, tier, hashes):
        self.both("stage", rank, tier, array(*hashes))

    @rule(rank=ranks, method=st.sampled_from(["commit_staged", "drop_staged"]))
    def end_staging(self, rank, method):
        self.both(method, rank)

    @rule(rank=ranks, is_right=st.booleans())
    def check(self, rank, is_right):
        self.both("check", rank, self.oracle.summary(rank) if is_right else SOMETHING)

    @rule(rank=ranks, events=st.lists(events, min_size=1, max_size=4), is_right=st.booleans())
    def apply(self, rank, events, is_right):
        self.oracle.apply(rank, batch_of(rank, events), 0, 1)
        says = self.oracle.summary(rank) if is_right else SOMETHING
        state = (says.counts, says.digests)
        self.oracle.check(rank, HeldSummary(*state))
        assert self.index.apply(rank, batch_of(rank, events, *state), 0, 1) == DONE

    @rule(prompt=st.lists(st.integers(0, 12), max_size=12, unique=True))
    def match(self, prompt):
        found = dict(self.index.find_matches(array(*prompt)).items())
        assert found == self.oracle.find_matches(array(*prompt))

    @rule(rank=ranks)
    def summarise(self, rank):
        assert self.index.summary(rank) == self.oracle.summary(rank)

    @rule()
    def dump(self):
        assert contents(self.index) == contents(self.oracle)

    @rule(sub_tables=st.integers(1, 16))
    def sweep(self, sub_tables):
        self.index.sweep(sub_tables)

    @rule()
    def compare_differing(self):
        self.index.flush()
        assert sorted(self.index.take_differing()) == sorted(self.oracle.take_differing())

    @invariant()
    def answers_changes_at_once(self):
        assert self.index.store(Rank(9, 0), DEVICE, array())

    def teardown(self):
        try:
            self.compare_differing()
            self.dump()
        finally:
            self.index.close()


AgainstTheOracle.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestAgainstTheOracle = AgainstTheOracle.TestCase


def hybrid_batch(events, layout):
    zeros = (0,) * len(layout.classes)
    packed = pack_batch(HeldState(), events)
    return EventBatch(1, 0, 1, IDENTITY, 1, len(events), packed, HybridState(layout, zeros, zeros))


def test_hybrid_ranks_resume_in_shards_too(start):
    index, window = start(small_tree), Layout(16, 16, (LayerClass("window", 16, 17),))
    blocks = pack_hashes(array(1, 2, 3))
    index.apply(
        W1, hybrid_batch([Stored(DEVICE, blocks), ClassStored(0, blocks[:16])], window), 0, 1
    )
    index.store(W2, DEVICE, array(1))
    found = index.resumable(array(1, 2, 3), 100, 16)
    assert dict(found.items()) == {W1: Overlap(2, 2, 2, 2), W2: Overlap(1, 1, 1, 1)}
    assert index.summary(W1).class_counts == (2, 0, 0, 0)
    index.stage(W1, DEVICE, array(1))
    index.commit_staged(W1)
    assert dict(index.resumable(array(1), 100, 16).items())[W1].device == 1


@pytest.mark.parametrize("event", [ClassStored(1, b""), ClassRemoved(2, b""), ClassCleared(3)])
def test_an_event_of_a_class_that_is_not_there_is_refused_at_once(start, event):
    index, layout = start(small_tree), Layout(16, 16, (LayerClass("state", 16),))
    with pytest.raises(WireError):
        index.apply(W1, hybrid_batch([event], layout), 0, 1)
    assert index.summary(W1) == NOTHING_HELD


def test_long_streams_in_four_shards_end_as_their_definition_says(start):
    """Prefixes of shared prompts, driven as messages are: change, holes, check."""
    random = np.random.default_rng(5)
    prompts = [chain([*range(40), *range(1000 * p, 1000 * p + 160)]) for p in range(4)]
    index, oracle = start(lambda: RadixTree(1 << 16), shards=4, queue_limit=8), ExactIndex()
    for _ in range(1500):
        rank, prompt = Rank(int(random.integers(8)), 0), prompts[random.integers(4)]
        if random.random() < 0.05:
            change = ("clear", rank)
        else:
            change = ("store", rank, DEVICE, prompt[: random.integers(1, 201)])
        for each in (index, oracle):
            getattr(each, change[0])(*change[1:])
        index.note_holes(rank, (0, 0, 0, 0))
        index.check(rank, oracle.summary(rank))
    for prompt in prompts:
        assert dict(index.find_matches(prompt).items()) == oracle.find_matches(prompt)
    assert contents(index) == contents(oracle)
    assert index.take_differing() == []
    while index.sweep(64):
        pass
    assert index.stats().unswept_holders == 0


def test_an_answer_reflects_what_was_posted_before(start):
    index = start()
    index.store(W1, DEVICE, array(1, 2, 3))
    index.store(W2, DEVICE, array(1, 2, 3))
    index.remove(W1, DEVICE, array(2))
    found = dict(index.find_matches(array(1, 2, 3)).items())
    assert found == {W1: Overlap(1, 1, 1, 1), W2: Overlap(3, 3, 3, 3)}
    assert dict(index.find_matches(array(9)).items()) == {}


def test_sums_count_a_block_once_per_shard(start):
    index = start(small_tree, shards=2)
    for rank in (W1, W2, W3):
        index.store(rank, DEVICE, array(1, 2))
    assert index.stats().blocks == 4
    assert index.stats().max_blocks == 2 * small_tree().stats().max_blocks


def test_arrays_may_be_views_of_message_bytes(start):
    index = start()
    index.store(W1, DEVICE, unpack_hashes(pack_hashes(array(1, 2))))
    index.stage(W2, DEVICE, unpack_hashes(pack_hashes(array(1))))
    index.commit_staged(W2)
    found = dict(index.find_matches(array(1, 2)).items())
    assert {rank: overlap.device for rank, overlap in found.items()} == {W1: 2, W2: 1}


def test_a_dump_is_not_changed_by_what_comes_after_it(start):
    index = start()
    index.store(W1, DEVICE, array(1))
    index.store(W2, DEVICE, array(2))
    dump = index.dump()
    index.clear(W1)
    index.store(W2, DEVICE, array(3))
    index.flush()
    assert {each.rank: each.sequence_hashes.tolist() for each in dump} == {W1: [1], W2: [2]}


def test_ranks_of_a_worker_share_a_shard_and_workers_are_spread(sharded, parts):
    for worker_id in range(6):
        for dp_rank in range(3):
            sharded.store(Rank(worker_id, dp_rank), DEVICE, array(1))
    sharded.flush()
    by_worker = [
        {tuple(shards_of(parts, Rank(worker, dp))) for dp in range(3)} for worker in range(6)
    ]
    assert all(len(shards) == 1 for shards in by_worker)
    assert sorted(shard for (shard,) in by_worker) == [(0,)] * 3 + [(1,)] * 3


def test_a_worker_is_forgotten_when_its_last_rank_is_cleared(sharded, parts):
    other = Rank(1, 1)
    sharded.store(W1, DEVICE, array(1))
    sharded.store(other, DEVICE, array(1))
    sharded.store(W2, DEVICE, array(1))
    sharded.clear(W1)
    sharded.store(W3, DEVICE, array(1))
    sharded.clear(other, DEVICE)
    sharded.clear(other)
    sharded.store(Rank(4, 0), DEVICE, array(1))
    sharded.store(Rank(5, 0), DEVICE, array(1))
    sharded.flush()
    placed = [shards_of(parts, rank) for rank in (W2, W3, Rank(4, 0), Rank(5, 0))]
    assert placed == [[1], [0], [0], [1]]


def test_a_worker_is_forgotten_once_its_staging_ended(sharded, parts):
    sharded.stage(W1, DEVICE, array(1))
    sharded.commit_staged(W1)
    sharded.clear(W1)
    for rank in (W2, W3):
        sharded.store(rank, DEVICE, array(1))
    sharded.flush()
    assert [shards_of(parts, rank) for rank in (W2, W3)] == [[0], [1]]


def test_a_rank_that_is_cleared_while_staged_stays_where_its_staged_blocks_are(sharded, parts):
    sharded.store(W2, DEVICE, array(1))
    sharded.stage(W1, DEVICE, array(1, 2))
    sharded.clear(W1)
    sharded.commit_staged(W1)
    assert sharded.find_matches(array(1, 2)).get(W1, None) == Overlap(2, 2, 2, 2)
    assert [shards_of(parts, rank) for rank in (W2, W1)] == [[0], [1]]


def test_ranks_never_seen_hold_nothing(start):
    index = start()
    assert index.remove(W1, DEVICE, array(1))
    index.clear(W1)
    index.drop_staged(W1)
    index.commit_staged(W1)
    index.note_holes(W1, None)
    index.check(W1, NOTHING_HELD)
    index.check(W2, SOMETHING)
    assert index.summary(W1) == NOTHING_HELD
    index.flush()
    assert index.take_differing() == [W2]


def test_a_batch_that_finds_no_room_makes_its_rank_differ(start):
    index = start(lambda: RadixTree(4, sub_bits=4), shards=2)
    event = Stored(DEVICE, pack_hashes(array(*range(100))))
    assert index.apply(W1, batch_of(W1, [event]), 0, 1) == DONE
    index.flush()
    assert index.take_differing() == [W1]


def test_a_malformed_batch_is_refused_at_once_and_changes_nothing(start):
    index = start(small_tree)
    batch = batch_of(W1, [Stored(DEVICE, pack_hashes(array(1)))])
    with pytest.raises(WireError):
        index.apply(W1, structs.replace(batch, last_event_id=2), 0, 1)
    with pytest.raises(WireError):
        index.apply(W1, structs.replace(batch, packed=batch.packed[:-1]), 0, 1)
    assert index.summary(W1) == NOTHING_HELD
    assert index.take_differing() == []


@pytest.mark.parametrize("method", ["store", "stage"])
def test_a_rank_that_found_no_room_differs(start, method):
    index = start(lambda: RadixTree(4, sub_bits=4), shards=2)
    assert getattr(index, method)(W1, DEVICE, array(*range(100)))
    assert index.store(W2, DEVICE, array(1))
    index.flush()
    assert index.take_differing() == [W1]
    assert index.take_differing() == []


def test_refused_removal_reports_a_difference_once(start):
    class Refusing(ExactIndex):
        def remove(self, rank, tier, sequence_hashes):
            return False

    index = start(Refusing)
    assert index.remove(W1, DEVICE, array(1))
    index.check(W1, SOMETHING)
    index.flush()
    assert index.take_differing() == [W1]


def test_a_full_queue_holds_the_caller_until_there_is_room(start):
    gate = threading.Event()

    class Gated(ExactIndex):
        def store(self, rank, tier, sequence_hashes):
            gate.wait()
            return super().store(rank, tier, sequence_hashes)

    def open_gate():
        until(lambda: index.full_waits, poll_s=0.001)
        begun_while_closed.append(len(begun))
        gate.set()

    index, begun, begun_while_closed = start(Gated, shards=2, queue_limit=2), [], []
    opener = threading.Thread(target=open_gate)
    opener.start()
    for block in range(20):
        begun.append(block)
        index.store(W1, DEVICE, array(block))
    opener.join()
    assert begun_while_closed == [3]
    assert index.find_matches(array(*range(20))).get(W1, None) == Overlap(20, 20, 20, 20)


class FailingStore(ExactIndex):
    def store(self, rank, tier, sequence_hashes):
        raise ZeroDivisionError("in a shard")


def test_an_exception_in_a_shard_reaches_the_caller_and_stays(start):
    index = start(FailingStore, shards=2, queue_limit=1)
    index.store(W1, DEVICE, array(1))
    with pytest.raises(RuntimeError, match="a shard of the index failed") as caught:
        index.find_matches(array(1))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for call in (index.flush, index.take_differing, index.stats, lambda: index.clear(W2)):
        with pytest.raises(RuntimeError, match="a shard of the index failed"):
            call()
    index.close()
    with pytest.raises(RuntimeError, match="a shard of the index failed"):
        index.flush()


def test_failed_shard_does_not_block_writers(start):
    """Changes after the failure are passed over, so room comes."""
    index = start(FailingStore, shards=1, queue_limit=1)

    def store_many():
        for _ in range(100_000):
            index.store(W1, DEVICE, array(1))

    with pytest.raises(RuntimeError):
        store_many()


def test_nothing_is_changed_after_a_failure(start):
    gate, calls = threading.Event(), []

    class FailingLate(FailingStore):
        def store(self, rank, tier, sequence_hashes):
            gate.wait()
            calls.append(rank)
            super().store(rank, tier, sequence_hashes)

    index = start(FailingLate, shards=1)
    for _ in range(200):
        index.store(W1, DEVICE, array(1))
    gate.set()
    with pytest.raises(RuntimeError, match="a shard of the index failed"):
        index.flush()
    assert calls == [W1]


def test_unseen_failure_is_raised_by_close(start):
    failed = threading.Event()

    class Failing(FailingStore):
        def store(self, rank, tier, sequence_hashes):
            failed.set()
            super().store(rank, tier, sequence_hashes)

    index = start(Failing)
    index.store(W1, DEVICE, array(1))
    failed.wait()
    with pytest.raises(RuntimeError, match="a shard of the index failed"):
        index.close()
    index.close()


def test_failed_query_leaves_the_index_unchanged(start):
    index = start(small_tree)
    index.store(W1, DEVICE, array(1))
    with pytest.raises(TypeError):
        index.find_matches(np.array([1.5]))
    assert index.summary(W1).counts == (1, 0, 0, 0)


def test_closing_ends_the_threads_and_the_parts_and_can_be_repeated(start):
    closed = []

    class Closing(ExactIndex):
        def close(self):
            closed.append(self)

    index = start(Closing, shards=3)
    for block in range(200):
        index.store(Rank(block % 5, 0), HOST, array(block))
    index.close()
    index.close()
    assert not shard_threads()
    assert len(closed) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda index: index.store(W1, DEVICE, array(1)),
        lambda index: index.clear(W1),
        lambda index: index.find_matches(array(1)),
        lambda index: index.summary(W1),
        lambda index: index.dump(),
        lambda index: index.stats(),
        lambda index: index.take_differing(),
        lambda index: index.flush(),
    ],
)
def test_closed_index_raises(start, call):
    index = start()
    index.store(W1, DEVICE, array(1))
    index.close()
    with pytest.raises(RuntimeError, match="the index is closed"):
        call(index)


def test_an_abandoned_index_does_not_keep_the_interpreter_alive():
    script = (
        "from router.indexer.concurrent import ConcurrentIndex\n"
        "from router.indexer.factory import DisabledIndex\n"
        "abandoned = ConcurrentIndex(DisabledIndex, 2)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
