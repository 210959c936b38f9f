"""Every held block, as processes of this field exchange it. Mutates nothing."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter

from msgspec import json
from msgspec.structs import astuple

from router.core import RouterCore
from router.indexer.dumps import IndexDump, RankBlocks, dumped_blocks
from router.protocol.dumps import (
    DumpBlock,
    DumpEvent,
    ScopeDump,
    dump_event,
    scope_key,
)
from router.protocol.values import Rank, Scope

PIECE_BLOCKS = 1024
"""Blocks that a dump encodes at a time: a third of a millisecond."""


def block_sizes(core: RouterCore) -> dict[Scope, int]:
    """The block size of each scope; one of them, should they differ."""
    return {w.announcement.scope: w.announcement.identity.block_size for w in core.fleet}


def dump_pieces(
    dump: IndexDump, block_sizes: Mapping[Scope, int], only: Rank | None = None
) -> Iterator[bytes]:
    """Every held block, as processes of this field exchange it: JSON (`Dump`), in pieces.

    `only`: of this rank. May run on another thread. O(blocks held), a piece O(1) but for the first.
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
    """Every held block, one event a rank and tier. O(blocks held)."""
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
