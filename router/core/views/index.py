"""Views of the index: the holders of one block, and the dump of all blocks. Read-only."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter

import numpy as np
from msgspec import json
from msgspec.structs import astuple

from router.core.core import RouterCore
from router.errors import InvalidFieldError
from router.indexer.base import NO_OVERLAP, Overlap
from router.indexer.dumps import IndexDump, RankBlocks, dumped_blocks
from router.protocol.dumps import (
    TIER_NAMES,
    DumpBlock,
    DumpEvent,
    ScopeDump,
    TierName,
    dump_event,
    scope_key,
)
from router.protocol.values import U64_MAX, Rank, Scope
from router.protocol.workers import BlockHolder, BlockHolders


def block_holders(core: RouterCore, sequence_hash: int, now_s: float) -> BlockHolders:
    """Return the holders of a block by its public hash. Raises InvalidFieldError. O(ranks)."""
    if sequence_hash > U64_MAX:
        raise InvalidFieldError("sequence_hash", "too large", f"0 to {U64_MAX}", status=422)
    alone = np.array([core.naming.name(sequence_hash)], np.uint64)
    workers = [worker.announcement for worker in core.fleet]
    scopes = {worker.scope for worker in workers}
    held = {scope: core.index.find_matches(scope, alone) for scope in scopes}
    holders = [
        BlockHolder(
            worker.model_name,
            worker.routing_group,
            rank.worker_id,
            rank.dp_rank,
            _fastest_tier(held[worker.scope].get(rank, NO_OVERLAP)),
            core.trust(rank, now_s),
        )
        for worker in workers
        for rank in worker.ranks
        if rank in held[worker.scope]
    ]
    return BlockHolders(sequence_hash, holders)


def _fastest_tier(overlap: Overlap) -> TierName:
    cumulative = (overlap.device, overlap.host, overlap.disk, overlap.remote)
    return TIER_NAMES[cumulative.index(1)]


PIECE_BLOCKS = 1024
"""Blocks that a dump encodes at a time, in a third of a millisecond."""


def block_sizes(core: RouterCore) -> dict[Scope, int]:
    """Return the block size of each scope; one of them, should its workers differ."""
    return {w.announcement.scope: w.announcement.identity.block_size for w in core.fleet}


def dump_pieces(
    dump: IndexDump, block_sizes: Mapping[Scope, int], only: Rank | None = None
) -> Iterator[bytes]:
    """Yield all held blocks as JSON (`Dump`), in pieces, in the format of Dynamo's dumps.

    `only`: of this rank. May run on another thread. O(blocks held); a piece after the first is
    O(1).
    """
    yield b"{"
    wanted = (each for each in dumped_blocks(dump) if only in (None, each[1].rank))
    for i, (scope, held) in enumerate(groupby(wanted, key=itemgetter(0))):
        head = json.encode({scope_key(scope): ScopeDump(block_sizes.get(scope), [])})
        yield (b"," if i else b"") + head[1:].removesuffix(b"]}}")
        for j, (_, blocks) in enumerate(held):
            yield b"," if j else b""
            yield from _event_pieces(blocks)
        yield b"]}"
    yield b"}"


def dump_events(dump: IndexDump) -> list[DumpEvent]:
    """Return all held blocks, one event per rank and tier. O(blocks held)."""
    return [dump_event(*astuple(blocks)) for _, blocks in dumped_blocks(dump)]


def _event_pieces(held: RankBlocks) -> Iterator[bytes]:
    no_blocks = held.sequence_hashes[:0]
    encoded = json.encode(dump_event(held.rank, held.tier, held.event_id, no_blocks))
    head, _, tail = encoded.rpartition(b"]")
    yield head
    for start in range(0, len(held.sequence_hashes), PIECE_BLOCKS):
        hashes = held.sequence_hashes[start : start + PIECE_BLOCKS].tolist()
        piece = json.encode([DumpBlock(each) for each in hashes])[1:-1]
        yield b"," + piece if start else piece
    yield b"]" + tail
