"""A snapshot of an index: its contents, cursors and position in the event stream, as bytes.

    "KVRX" │ version u16 │ reserved u16 │ contents length u64 │ checksum u64 │
             contents │ zeros up to a word │ sequence hashes, rank by rank, tier by tier, then
                                             class by class

Contents are msgpack: the stream's position, then each rank's state and its number of blocks in each
tier, and in each class of a hybrid rank's layout. A snapshot of another version is not read.
Words are little-endian; the checksum is XXH3-64 of all bytes after it. Only ranks that match their
reported sums are included. Their blocks are a dump read in slices (`dumps.py`), so they are right
only together with the events after the position: a restored rank is verified when those are read.
Encoding and decoding may run on another thread; they hold the GIL for one rank at a time.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct, msgpack
from xxhash import xxh3_64

from router.indexer.base import ExportedBlocks, SnapshotError
from router.indexer.dumps import RankState, ScopeSlices, blocks_by_scope
from router.protocol.values import (
    TIERS,
    UNREADABLE,
    HashArray,
    PerTier,
    Rank,
    Scope,
    StreamPosition,
    Tier,
)

MAGIC = b"KVRX"
VERSION = 3

_HEADER = struct.Struct("<4sHHQQ")
_HEADER_WORDS = _HEADER.size // 8
_CHECKED_BYTES = 1 << 20


class RankSnapshot(Struct, frozen=True):
    """State of a rank, and the blocks it held then or shortly after.

    `class_blocks`: those of each class, if it is hybrid.
    """

    state: RankState
    blocks: list[ExportedBlocks]
    class_blocks: list[HashArray] = []

    @property
    def held(self) -> Iterator[tuple[int, HashArray]]:
        """The blocks, each time with their tier, or with the number of tiers plus their class."""
        for of_tier in self.blocks:
            yield of_tier.tier, of_tier.sequence_hashes
        for class_index, hashes in enumerate(self.class_blocks):
            yield TIERS + class_index, hashes

    @property
    def block_count(self) -> int:
        """The number of blocks, each counted once per tier, and once per class."""
        return sum(len(hashes) for _, hashes in self.held)


class Snapshot(Struct, frozen=True):
    """Ranks, in order, and the position of the event stream at their states."""

    position: StreamPosition
    ranks: list[RankSnapshot]


class _RankContents(Struct, frozen=True, array_like=True):
    state: RankState
    counts: PerTier
    class_counts: tuple[Annotated[int, Meta(ge=0)], ...]

    def __post_init__(self) -> None:
        layout = None if self.state.hybrid is None else self.state.hybrid.layout
        if len(self.class_counts) != (0 if layout is None else len(layout.classes)):
            raise ValueError(f"{self.state.rank}: one count for each class")


class _Contents(Struct, frozen=True, array_like=True):
    position: StreamPosition
    ranks: list[_RankContents]


_decoder = msgpack.Decoder(_Contents)
_NOTHING: HashArray = np.empty(0, np.uint64)


def encode_snapshot(
    position: StreamPosition,
    states: Sequence[RankState],
    slices: ScopeSlices,
    class_slices: ScopeSlices = (),
) -> memoryview:
    """Encode states, and the blocks held at them or shortly after. O(blocks held).

    Blocks of classes that a rank's state does not have are left out: events that follow store them.
    """
    held, of_classes = _by_rank(slices), _by_rank(class_slices)
    ranks: list[_RankContents] = []
    arrays: list[HashArray] = []
    for state in sorted(states, key=lambda each: each.rank):
        here = held.get((state.scope, state.rank), {})
        classes: list[HashArray] = []
        if state.hybrid is not None:
            found = of_classes.get((state.scope, state.rank), {})
            count = len(state.hybrid.layout.classes)
            classes = [found.get(Tier(index), _NOTHING) for index in range(count)]
        first, second, third, fourth = (len(here.get(tier, ())) for tier in Tier)
        counts = tuple(map(len, classes))
        ranks.append(_RankContents(state, (first, second, third, fourth), counts))
        arrays += [here[tier] for tier in sorted(here)] + classes
    return _payload(msgpack.encode(_Contents(position, ranks)), arrays)


def _by_rank(slices: ScopeSlices) -> dict[tuple[Scope, Rank], dict[Tier, HashArray]]:
    held: dict[tuple[Scope, Rank], dict[Tier, HashArray]] = {}
    for scope, blocks in blocks_by_scope(slices):
        held.setdefault((scope, blocks.rank), {})[blocks.tier] = blocks.sequence_hashes
    return held


def decode_snapshot(payload: bytes | memoryview) -> Snapshot:
    """Decode a snapshot; its blocks are views of the payload. O(bytes).

    Raises SnapshotError for anything but a whole, undamaged snapshot of this version.
    """
    if len(payload) < _HEADER.size or payload[:4] != MAGIC:
        raise SnapshotError("foreign", "it does not begin like one")
    _, version, _, length, checksum = _HEADER.unpack_from(payload)
    if version != VERSION:
        raise SnapshotError("version", f"{version} (allowed: {VERSION})")
    body = memoryview(payload)[_HEADER.size :]
    if _checksum(body) != checksum:
        raise SnapshotError("damaged", "its checksum differs")
    try:
        contents = _decoder.decode(body[:length])
    except UNREADABLE as error:
        raise SnapshotError("malformed", str(error)) from error
    return Snapshot(contents.position, _ranks(contents, body[_padded(length) :]))


def _payload(contents: bytes, arrays: Sequence[HashArray]) -> memoryview:
    padded = contents.ljust(_padded(len(contents)), b"\0")
    start = _HEADER_WORDS + len(padded) // 8
    words = np.empty(start + sum(map(len, arrays)), np.dtype("<u8"))
    payload = words.data.cast("B")
    payload[_HEADER.size : 8 * start] = padded
    for array in arrays:
        words[start : start + len(array)] = array
        start += len(array)
    checksum = _checksum(payload[_HEADER.size :])
    _HEADER.pack_into(payload, 0, MAGIC, VERSION, 0, len(contents), checksum)
    return payload


def _ranks(contents: _Contents, hashes: memoryview) -> list[RankSnapshot]:
    total = sum(sum(each.counts) + sum(each.class_counts) for each in contents.ranks)
    if 8 * total != len(hashes):
        raise SnapshotError("malformed", f"{len(hashes)} bytes of hashes are not what it names")
    words, start, ranks = np.frombuffer(hashes, "<u8"), 0, []
    for each in contents.ranks:
        blocks = []
        for tier, count in zip(Tier, each.counts, strict=True):
            if count:
                blocks.append(ExportedBlocks(each.state.rank, tier, words[start : start + count]))
            start += count
        classes = []
        for count in each.class_counts:
            classes.append(words[start : start + count])
            start += count
        ranks.append(RankSnapshot(each.state, blocks, classes))
    return ranks


def _checksum(body: memoryview) -> int:
    """Return the checksum, computed in pieces so that other threads may run in between."""
    digest = xxh3_64()
    for start in range(0, len(body), _CHECKED_BYTES):
        digest.update(body[start : start + _CHECKED_BYTES])
    return digest.intdigest()


def _padded(length: int) -> int:
    return -(-length // 8) * 8
