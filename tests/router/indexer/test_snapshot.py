"""An index kept as bytes, and loaded again."""

import struct
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from router.indexer.base import SnapshotError
from router.indexer.concurrent import ConcurrentIndex
from router.indexer.dumps import blocks_by_scope
from router.indexer.event_log import LogVerdict
from router.indexer.radix_tree import radix_tree
from router.indexer.radix_tree.radix_tree import RadixTree
from router.indexer.snapshot import MAGIC, VERSION, decode_snapshot, encode_snapshot
from router.indexer.trusted_index import TrustedIndex
from router.protocol.events import Checkpoint
from router.protocol.hybrid import LayerClass, Layout
from router.protocol.replies import TrustState
from router.protocol.values import SCHEME, HeldState, Identity, Rank, Scope, StreamPosition, Tier
from router.publisher.journal.journal import EventJournal

SCOPES = [Scope("m", "a"), Scope("m", "b")]
IDENTITY = Identity(SCHEME, 16)
RANKS = [Rank(1, 0), Rank(1, 1), Rank(2, 0)]


def scope_of(rank):
    return SCOPES[rank.worker_id - 1]


HYBRID_LIFE = 8
WINDOW = Layout(16, 16, (LayerClass("window", 16, 33),))
WINDOW_AND_STATE = Layout(16, 16, (*WINDOW.classes, LayerClass("state", 16)))
POSITION = StreamPosition("2026-01-01T00:00:00", 7)


def make_tree():
    return RadixTree(1 << 12, sub_bits=2)


def blind_index(ranks=RANKS, make_indexer=make_tree):
    index = TrustedIndex(make_indexer)
    for rank in ranks:
        index.add_rank(rank, scope_of(rank), IDENTITY, 0.0)
    return index


def apply_all(index, messages):
    verdicts = [index.apply(message, 1.0) for message in messages]
    finish(index)
    return verdicts


def finish(index):
    while index.apply_slice():
        pass


def deliver(journal, index):
    return apply_all(index, journal.take())


def encoded(index):
    slices, class_slices = list(index.dump_slices()), list(index.dump_class_slices())
    return encode_snapshot(POSITION, index.rank_states(), slices, class_slices)


def resume(index, payload, now_s=5.0):
    """Which ranks were restored; what followed is not applied yet."""
    snapshot = decode_snapshot(payload)
    assert snapshot.position == POSITION
    restored = [r.state.rank for r in snapshot.ranks if index.resume(r.state, r.held, now_s)]
    finish(index)
    return restored


def settle(index):
    while index.settle(1, 5.0):
        pass


def restore(index, payload):
    restored = resume(index, payload)
    settle(index)
    return restored


@pytest.fixture
def journals():
    made = {rank: EventJournal(rank, 7, IDENTITY) for rank in RANKS}
    made[RANKS[0]].stored(Tier.DEVICE, [1, 2, 3], None)
    made[RANKS[0]].stored(Tier.HOST, [2, 9], 1)
    made[RANKS[1]].stored(Tier.DEVICE, [1, 2], None)
    made[RANKS[2]].stored(Tier.REMOTE, [0, 2**64 - 1], None)
    return made


@pytest.fixture
def index(journals):
    index = blind_index()
    for journal in journals.values():
        deliver(journal, index)
    return index


def adds_up(index, rank):
    """Nothing but the lack of reports speaks against it."""
    return index.trust(rank, 6.0).reason == "no report confirms it"


def contents(index):
    held = {(b.rank, b.tier): sorted(b.sequence_hashes.tolist()) for _, b in index.dump()}
    classes = {
        (b.rank, b.tier): sorted(b.sequence_hashes.tolist())
        for _, b in blocks_by_scope(list(index.dump_class_slices()))
    }
    return held, classes, index.rank_states()


def test_a_restored_index_is_the_same_and_goes_on(index, journals):
    other = blind_index()
    assert restore(other, encoded(index)) == RANKS
    assert contents(other) == contents(index)
    assert adds_up(other, RANKS[0])
    journals[RANKS[0]].removed(Tier.DEVICE, [3])
    assert deliver(journals[RANKS[0]], other) == [LogVerdict.APPLY]
    assert adds_up(other, RANKS[0])


def test_a_restored_hybrid_rank_resumes_prompts_as_before():
    index, other = blind_index(RANKS[:1]), blind_index(RANKS[:1])
    journal = EventJournal(RANKS[0], 7, IDENTITY)
    journal.stored(Tier.DEVICE, [1, 2, 3, 4, 5], None)
    journal.set_layout(WINDOW_AND_STATE)
    journal.class_stored(0, np.array([2, 3], np.uint64))
    journal.class_stored(1, np.array([3], np.uint64))
    deliver(journal, index)
    assert restore(other, encoded(index)) == RANKS[:1]
    assert contents(other) == contents(index)
    prompt = np.array([1, 2, 3, 4, 5], np.uint64)
    assert other.resumable(SCOPES[0], prompt, 80, 16)[RANKS[0]].device == 3
    assert (other.layout(RANKS[0]), adds_up(other, RANKS[0])) == (WINDOW_AND_STATE, True)
    journal.class_removed(1, np.array([3], np.uint64))
    assert deliver(journal, other) == [LogVerdict.APPLY]
    assert other.resumable(SCOPES[0], prompt, 80, 16)[RANKS[0]].device == 0
    assert adds_up(other, RANKS[0])


def test_only_blind_ranks_of_the_same_kind_are_filled(index, journals):
    other = blind_index(RANKS[1:2])
    other.add_rank(RANKS[2], scope_of(RANKS[2]), Identity(SCHEME, 32), 0.0)
    deliver(journals[RANKS[1]], other)
    journals[RANKS[1]].require_checkpoint()
    deliver(journals[RANKS[1]], other)
    before = contents(other)
    assert restore(other, encoded(index)) == []
    assert contents(other) == before


def test_ranks_that_do_not_add_up_are_left_out(index):
    index.stream_lost(RANKS, 2.0)
    assert restore(blind_index(), encoded(index)) == []


def test_inconsistent_snapshot_is_broken():
    index = blind_index(RANKS[:1])
    journal = EventJournal(RANKS[0], 7, IDENTITY)
    journal.stored(Tier.DEVICE, [1, 2], None)
    deliver(journal, index)
    [state] = index.rank_states()
    other = blind_index(RANKS[:1])
    assert other.resume(state, [], 5.0)
    finish(other)
    assert other.trust(RANKS[0], 5.0).state is TrustState.DEGRADED
    assert "snapshot" in other.trust(RANKS[0], 5.0).reason
    assert other.rank_states() == []
    settle(other)
    assert other.trust(RANKS[0], 5.0).reason == "digest differs"


def with_header(body, magic=MAGIC, version=VERSION, length=None, checksum=None):
    length = len(body) if length is None else length
    checksum = xxh3_64_intdigest(body) if checksum is None else checksum
    return struct.pack("<4sHHQQ", magic, version, 0, length, checksum) + body


def test_unusable_snapshots_raise_one_error_with_the_reason(index):
    good = bytes(encoded(index))
    body, length = good[24:], struct.unpack_from("<Q", good, 8)[0]
    assert with_header(body, length=length) == good
    unusable = [
        (b"", "foreign"),
        (b"KVR", "foreign"),
        (good[:20], "foreign"),
        (good[:-1], "damaged"),
        (good[:24], "damaged"),
        (good + b"\0", "damaged"),
        (with_header(body, magic=b"KVRY"), "foreign"),
        (with_header(body, version=1), "version"),
        (with_header(body, checksum=1), "damaged"),
        (with_header(body), "malformed"),
        (with_header(body, length=length - 8), "malformed"),
        (with_header(body[:-8], length=length), "malformed"),
        (with_header(body[:-3], length=length), "malformed"),
        (with_header(b"\xff\xff"), "malformed"),
        (with_header(b"\x91\x92\x01\x02"), "malformed"),
        (with_header(b""), "malformed"),
    ]
    for payload, problem in unusable:
        with pytest.raises(SnapshotError) as raised:
            decode_snapshot(payload)
        assert raised.value.problem == problem


def test_an_empty_index_is_a_snapshot_too():
    assert restore(blind_index(), encoded(blind_index())) == []


@given(st.data())
def test_no_damage_goes_unnoticed(data):
    index = blind_index(RANKS[:1])
    journal = EventJournal(RANKS[0], 7, IDENTITY)
    journal.stored(Tier.DEVICE, [1, 2], None)
    deliver(journal, index)
    damaged = bytearray(encoded(index))
    position = data.draw(st.integers(16, len(damaged) - 1))
    damaged[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SnapshotError):
        decode_snapshot(bytes(damaged))


def blocks_of(index, rank):
    slices = [each for _, each in index.dump() if each.rank == rank]
    return {(each.tier, block) for each in slices for block in each.sequence_hashes.tolist()}


def test_a_dump_fills_a_blind_rank_until_its_checkpoint(index, journals):
    other = blind_index()
    held = [b for _, b in index.dump() if b.rank == RANKS[0]]
    assert other.restore(RANKS[0], 4, held, 5.0)
    assert not other.restore(RANKS[0], 4, held, 5.0)
    finish(other)
    assert not other.restore(RANKS[0], 4, held, 5.0)
    trust = other.trust(RANKS[0], 5.0)
    assert (trust.state, trust.reason) == (TrustState.DEGRADED, "restored from a dump")
    prompt = np.array([1, 2, 3], dtype=np.uint64)
    assert other.find_matches(SCOPES[0], prompt)[RANKS[0]].device == 3
    assert blocks_of(index, RANKS[0]) == blocks_of(other, RANKS[0])
    journals[RANKS[0]].require_checkpoint()
    assert deliver(journals[RANKS[0]], other) == [LogVerdict.NEW_LIFE]
    assert adds_up(other, RANKS[0])


def test_reports_before_verification_are_not_trusted(index, journals):
    """A restored rank's later events are applied; what it had of them already does not matter."""
    payload = encoded(index)
    journal, other = journals[RANKS[0]], blind_index()
    resume(other, payload)
    journal.cleared(Tier.HOST)
    messages = journal.take()
    journal.stored(Tier.DEVICE, [4, 5], 3)
    assert apply_all(other, messages) == [LogVerdict.APPLY]
    assert other.trust(RANKS[0], 6.0).state is TrustState.DEGRADED
    assert deliver(journal, other) == [LogVerdict.APPLY]
    settle(other)
    assert adds_up(other, RANKS[0])
    assert contents(other)[0][RANKS[0], Tier.DEVICE] == [1, 2, 3, 4, 5]


def test_a_gap_after_a_snapshot_is_a_gap(index, journals):
    other, journal = blind_index(), journals[RANKS[0]]
    payload = encoded(index)
    journal.stored(Tier.DEVICE, [4], 3)
    journal.take()
    journal.stored(Tier.DEVICE, [5], 4)
    resume(other, payload)
    assert deliver(journal, other) == [LogVerdict.GAP]
    settle(other)
    assert other.trust(RANKS[0], 6.0).reason == "events missing"
    assert (RANKS[0], "events missing") in other.take_wanted_checkpoints(9.0)


def test_a_rank_in_the_middle_of_a_checkpoint_is_left_out(index, journals):
    half = Checkpoint(1, 0, 7, IDENTITY, 9, 0, 2, (), HeldState())
    assert index.apply(half, 1.0) is LogVerdict.PARTIAL
    assert [state.rank for state in index.rank_states()] == RANKS[1:]


def test_new_life_replaces_a_restored_state(index):
    other = blind_index()
    resume(other, encoded(index))
    newborn = EventJournal(RANKS[0], 8, IDENTITY)
    newborn.stored(Tier.DEVICE, [7], None)
    assert deliver(newborn, other)[0] is LogVerdict.NEW_LIFE
    settle(other)
    assert adds_up(other, RANKS[0])
    assert contents(other)[0][RANKS[0], Tier.DEVICE] == [7]


def test_a_rank_that_leaves_and_comes_back_is_blind_again(index):
    other = blind_index()
    snapshot = decode_snapshot(encoded(index))
    assert other.resume(snapshot.ranks[0].state, snapshot.ranks[0].held, 5.0)
    other.add_rank(RANKS[0], scope_of(RANKS[0]), IDENTITY, 5.0)
    finish(other)
    settle(other)
    assert other.trust(RANKS[0], 6.0).state is TrustState.BLIND


def test_recreated_stream_breaks_restored_ranks(index):
    other = blind_index()
    resume(other, encoded(index))
    other.stream_lost(RANKS, 6.0)
    settle(other)
    assert other.trust(RANKS[0], 6.0).reason == "event stream lost"


def test_a_restore_without_room_is_broken():
    index = blind_index(RANKS[:1])
    journal = EventJournal(RANKS[0], 7, IDENTITY)
    journal.stored(Tier.DEVICE, range(1, 3000), None)
    deliver(journal, index)
    other = blind_index(RANKS[:1], lambda: RadixTree(1024, sub_bits=2))
    assert restore(other, encoded(index)) == RANKS[:1]
    assert "limit" in other.trust(RANKS[0], 6.0).reason


def random_path(random, blocks):
    """The end of some path in a binary tree, where block n follows block n // 2; and its parent."""
    path = [random.randrange(1 << 11, 1 << 12)]
    while path[0] > 1 and len(path) < blocks:
        path.insert(0, path[0] // 2)
    return path, path[0] // 2 or None


def change_classes(random, journal):
    """A hybrid rank: its layout changes too, and is gone at times."""
    if random.random() < 0.2:
        journal.classes_cleared()
        journal.set_layout(random.choice([WINDOW, WINDOW_AND_STATE, WINDOW_AND_STATE, None]))
    if journal.hybrid is None:
        return
    names = np.array(random_path(random, 3)[0], np.uint64)
    index = random.randrange(len(journal.hybrid.layout.classes))
    if random.random() < 0.7:
        journal.class_stored(index, names)
    else:
        journal.class_removed(index, names)
    if random.random() < 0.02:
        journal.classes_cleared()


def change(random, journal):
    if journal.incarnation == HYBRID_LIFE:
        change_classes(random, journal)
    kind, tier = random.random(), random.choice(list(Tier))
    if kind < 0.02:
        journal.cleared()
    elif kind < 0.06:
        journal.cleared(tier)
    elif kind < 0.12:
        journal.require_checkpoint()
    for _ in range(random.choice([1, 1, 1, 100])):
        path, parent = random_path(random, random.randint(1, 12))
        if random.random() < 0.7:
            journal.stored(tier, path, parent)
        else:
            journal.removed(tier, path)


class LiveIndex:
    """An index that reads a log to which its ranks write at random.

    `log`: all messages, of which the last may be half applied; `position`: how many surely are.
    """

    def __init__(self, seed, make_indexer):
        self.random, self.index = Random(seed), blind_index(make_indexer=make_indexer)
        lives = zip(RANKS, (7, 7, HYBRID_LIFE), strict=True)
        self.journals = {rank: EventJournal(rank, life, IDENTITY) for rank, life in lives}
        self.log, self.position = [], 0

    def go_on(self, times):
        for _ in range(times):
            journal = self.random.choice(list(self.journals.values()))
            change(self.random, journal)
            for message in journal.take():
                self._apply(message)

    def _apply(self, message):
        finish(self.index)
        self.position = len(self.log)
        self.log.append(message)
        self.index.apply(message, 1.0)
        if self.random.random() < 0.5:
            self.finish()

    def finish(self):
        finish(self.index)
        self.position = len(self.log)

    def snapshot(self):
        """Taken while the index goes on; with the position it says that it was taken at."""
        states, position, slices, class_slices = self.index.rank_states(), self.position, [], []
        for part in self.index.dump_slices():
            slices.append(part)
            self.go_on(2)
        for part in self.index.dump_class_slices():
            class_slices.append(part)
            if self.random.random() < 0.01:
                self.go_on(1)
        return encode_snapshot(POSITION, states, slices, class_slices), position


@pytest.mark.parametrize("make_indexer", [make_tree, lambda: ConcurrentIndex(make_tree, 2)])
@pytest.mark.parametrize("seed", range(30))
def test_events_between_slices_are_healed_by_those_that_follow(seed, make_indexer, monkeypatch):
    """Whatever happens while a snapshot is taken: the restored index ends up the same."""
    monkeypatch.setattr(radix_tree, "DUMP_ROWS", 1)
    live, copy = LiveIndex(seed, make_indexer), blind_index(make_indexer=make_indexer)
    live.go_on(50)
    payload, position = live.snapshot()
    live.go_on(live.random.choice([0, 10]))
    live.finish()
    resume(copy, payload)
    apply_all(copy, live.log[position:])
    settle(copy)
    assert contents(copy) == contents(live.index)
    assert all(adds_up(copy, rank) for rank in live.journals)
    for rank in RANKS:
        copy.drop_rank(rank)
        live.index.drop_rank(rank)
