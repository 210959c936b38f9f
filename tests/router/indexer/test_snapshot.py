"""An index kept as bytes, and loaded again."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from router.errors import SnapshotError
from router.indexer.event_log import Verdict
from router.indexer.radix_tree import RadixTree
from router.indexer.snapshot import MAGIC, VERSION, encode_snapshot, restore_snapshot
from router.indexer.trusted_index import TrustedIndex
from router.protocol.replies import TrustState
from router.protocol.values import SCHEME, Identity, Rank, Scope, Tier
from router.publisher.journal import EventJournal

SCOPES = [Scope("m", "a"), Scope("m", "b")]
IDENTITY = Identity(SCHEME, 16)
RANKS = [Rank(1, 0), Rank(1, 1), Rank(2, 0)]


def scope_of(rank):
    return SCOPES[rank.worker_id - 1]


def blind_index(ranks=RANKS):
    index = TrustedIndex(lambda: RadixTree(1 << 12, sub_bits=2))
    for rank in ranks:
        index.add_rank(rank, scope_of(rank), IDENTITY, 0.0)
    return index


def deliver(journal, index):
    return [index.apply(message, 1.0) for message in journal.take()]


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


def contents(index):
    held = {(b.rank, b.tier): sorted(b.sequence_hashes.tolist()) for _, b in index.dump()}
    return held, index.rank_states()


def test_a_restored_index_is_the_same_and_goes_on(index, journals):
    other = blind_index()
    assert restore_snapshot(encode_snapshot(index), other, 5.0) == RANKS
    assert contents(other) == contents(index)
    assert other.trust(RANKS[0], 6.0).state is TrustState.EXACT
    journals[RANKS[0]].removed(Tier.DEVICE, [3])
    assert deliver(journals[RANKS[0]], other) == [Verdict.APPLY]
    assert other.trust(RANKS[0], 6.0).state is TrustState.EXACT


def test_only_blind_ranks_of_the_same_kind_are_filled(index, journals):
    other = blind_index(RANKS[1:2])
    other.add_rank(RANKS[2], scope_of(RANKS[2]), Identity(SCHEME, 32), 0.0)
    deliver(journals[RANKS[1]], other)
    journals[RANKS[1]].require_checkpoint()
    deliver(journals[RANKS[1]], other)
    before = contents(other)
    assert restore_snapshot(encode_snapshot(index), other, 5.0) == []
    assert contents(other) == before


def test_ranks_that_do_not_add_up_are_left_out(index):
    index.stream_lost(2.0)
    assert restore_snapshot(encode_snapshot(index), blind_index(), 5.0) == []


def test_what_does_not_add_up_is_broken():
    index = blind_index(RANKS[:1])
    journal = EventJournal(RANKS[0], 7, IDENTITY)
    journal.stored(Tier.DEVICE, [1, 2], None)
    deliver(journal, index)
    [state] = index.rank_states()
    other = blind_index(RANKS[:1])
    assert other.resume(state, [], 5.0)
    assert other.trust(RANKS[0], 5.0).reason == "digest differs"


def body_of(payload):
    return payload[24:]


def with_header(body, magic=MAGIC, version=VERSION, length=None, checksum=None):
    length = len(body) if length is None else length
    checksum = xxh3_64_intdigest(body) if checksum is None else checksum
    return struct.pack("<4sHHQQ", magic, version, 0, length, checksum) + body


def test_unusable_ones_are_one_error_and_change_nothing(index):
    good = encode_snapshot(index)
    body = body_of(good)
    assert with_header(body) == good
    unusable = [
        b"",
        b"KVR",
        good[:20],
        good[:-1],
        good + b"\0",
        with_header(body, magic=b"KVRY"),
        with_header(body, version=VERSION + 1),
        with_header(body, checksum=1),
        with_header(b"\xff\xff"),
        with_header(b"\x91\x92\x01\x02"),
        with_header(body.replace(b"\xc4\x18", b"\xc4\x17", 1)),
    ]
    other = blind_index()
    for payload in unusable:
        with pytest.raises(SnapshotError):
            restore_snapshot(payload, other, 5.0)
    assert contents(other) == ({}, [])


@given(st.data())
def test_no_damage_goes_unnoticed(data):
    index = blind_index(RANKS[:1])
    journal = EventJournal(RANKS[0], 7, IDENTITY)
    journal.stored(Tier.DEVICE, [1, 2], None)
    deliver(journal, index)
    damaged = bytearray(encode_snapshot(index))
    position = data.draw(st.integers(8, len(damaged) - 1))
    damaged[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SnapshotError):
        restore_snapshot(bytes(damaged), blind_index(RANKS[:1]), 5.0)


def test_a_dump_fills_a_blind_rank_until_its_checkpoint(index, journals):
    other = blind_index()
    held = [b for _, b in index.dump() if b.rank == RANKS[0]]
    assert other.restore(RANKS[0], 4, held, 5.0)
    assert not other.restore(RANKS[0], 4, held, 5.0)
    trust = other.trust(RANKS[0], 5.0)
    assert (trust.state, trust.reason) == (TrustState.DEGRADED, "restored from a dump")
    prompt = np.array([1, 2, 3], dtype=np.uint64)
    assert other.find_matches(SCOPES[0], prompt)[RANKS[0]].device == 3
    summaries = [each._indexers[SCOPES[0]].summary(RANKS[0]) for each in (index, other)]
    assert summaries[0] == summaries[1]
    journals[RANKS[0]].require_checkpoint()
    assert deliver(journals[RANKS[0]], other) == [Verdict.NEW_LIFE]
    assert other.trust(RANKS[0], 6.0).state is TrustState.EXACT
