"""Restoring our index from a snapshot; the peer has none, and reads a dump of stored events."""

from time import perf_counter

import numpy as np
from index_streams import IDENTITY, INCARNATION, SCOPE
from index_worlds import random_hashes
from peer import PeerTree, stored_event
from rows import Row
from timing import Bounded, Scale, alternate

from router.indexer.dumps import RankState
from router.indexer.radix_tree.radix_tree import RadixTree
from router.indexer.snapshot import decode_snapshot, encode_snapshot
from router.indexer.trusted_index import TrustedIndex
from router.protocol.events import pack_state
from router.protocol.values import HashArray, HeldState, Rank, StreamPosition, Tier
from router.sequence.hashing._digest import digest

WORKERS = 128
MAX_BLOCKS = 1 << 24
GOAL_BLOCKS_PER_S = 5.0
PEER_BLOCKS, EVENT_BLOCKS = 262_144, 512


def restore_rows(scale: Scale) -> list[Row]:
    """Millions of blocks a second, from bytes to an index that adds up; one holder a block."""
    blocks = 1_000_000 if scale.quick else 5_000_000
    payload = _snapshot(_filled(blocks))
    events = _peer_dump()
    sides = [lambda _: _restore_s(payload), lambda _: _peer_restore_s(events)]
    ours_s, peer_s = (float(np.median(seconds)) for seconds in alternate(sides, scale.rounds))
    ours, peer = blocks / ours_s / 1e6, PEER_BLOCKS / peer_s / 1e6
    return [Bounded(f"{blocks:,} blocks", ours, peer, "M/s", GOAL_BLOCKS_PER_S, lower=False)]


def _blind() -> TrustedIndex:
    index = TrustedIndex(lambda: RadixTree(MAX_BLOCKS))
    for worker_id in range(WORKERS):
        index.add_rank(Rank(worker_id, 0), SCOPE, IDENTITY, 0.0)
    return index


def _filled(blocks: int) -> TrustedIndex:
    index = _blind()
    random = np.random.default_rng(1)
    for worker_id in range(WORKERS):
        rank = Rank(worker_id, 0)
        hashes = random_hashes(random, -(-blocks // WORKERS))
        index.resume(_state(rank, hashes), [(Tier.DEVICE, hashes)], 0.0)
    _settle(index)
    return index


def _settle(index: TrustedIndex) -> None:
    while index.apply_slice() or index.settle(WORKERS, 0.0):
        pass


def _snapshot(index: TrustedIndex) -> memoryview:
    states, slices = index.rank_states(), list(index.dump_slices())
    return encode_snapshot(StreamPosition("", 0), states, slices)


def _state(rank: Rank, hashes: HashArray) -> RankState:
    held = HeldState(counts=(len(hashes), 0, 0, 0), digests=(digest(hashes), 0, 0, 0))
    return RankState(SCOPE, rank, IDENTITY, INCARNATION, 1, pack_state(held))


def _restore_s(payload: memoryview) -> float:
    index = _blind()
    start = perf_counter()
    for each in decode_snapshot(payload).ranks:
        index.resume(each.state, each.held, 0.0)
    _settle(index)
    seconds = perf_counter() - start
    if len(index.rank_states()) != WORKERS:
        raise RuntimeError("the restored index does not add up")
    return seconds


def _peer_dump() -> list[bytes]:
    random = np.random.default_rng(2)
    events = []
    for event_id in range(PEER_BLOCKS // EVENT_BLOCKS):
        hashes = random_hashes(random, EVENT_BLOCKS).tolist()
        events.append(stored_event(event_id, None, hashes, hashes))
    return events


def _peer_restore_s(events: list[bytes]) -> float:
    tree = PeerTree()
    start = perf_counter()
    for event_id, event in enumerate(events):
        tree.apply(event_id % WORKERS, event)
    return perf_counter() - start
