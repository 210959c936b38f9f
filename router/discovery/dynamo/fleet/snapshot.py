"""The decoder of `radix-state`, the dump of Dynamo 1.0.2's routers in the object store.

Routers purge messages that all of them have read from the stream, and first store their result
here. The format is bincode with fixed-size, little-endian integers:

    u64 events │ event …       event: u64 worker_id │ u64 event_id │ u32 kind │ … │ u32 dp_rank
    kind 0, stored:  u8 has parent │ u64 parent │ u64 blocks │ block …
    block:           u64 block_hash │ u64 tokens_hash │ u8 has multimodal objects │ …
"""

import struct
from typing import Final

from router.discovery.dynamo.fleet.messages import (
    MAX_EVENT_BLOCKS,
    CacheEvent,
    Change,
    RouterEvent,
    StoredBlock,
    StoredBlocks,
)
from router.errors import WireError

_STORED: Final = 0
_EVENT = struct.Struct("<QQI")
_BLOCK = struct.Struct("<QQB")
_U8, _U32, _U64 = struct.Struct("<B"), struct.Struct("<I"), struct.Struct("<Q")
_LEAST_EVENT_BYTES = 33


class _Reader:
    """A sequential reader of numbers; its `read` raises struct.error at the end."""

    __slots__ = ("_offset", "_payload")

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._offset = 0

    @property
    def left_bytes(self) -> int:
        """The number of unread bytes."""
        return len(self._payload) - self._offset

    def read(self, layout: struct.Struct) -> tuple[int, ...]:
        """Read the next numbers."""
        numbers = layout.unpack_from(self._payload, self._offset)
        self._offset += layout.size
        return numbers

    def count(self, least_bytes: int, at_most: int) -> int:
        """Read the number of following items. Raises WireError if that is more than can follow."""
        (count,) = self.read(_U64)
        if count > min(at_most, self.left_bytes // least_bytes):
            raise WireError(f"{count} items in {self.left_bytes} bytes")
        return count

    def option(self) -> bool:
        """Read whether a value follows."""
        (flag,) = self.read(_U8)
        if flag > 1:
            raise WireError(f"{flag} is neither 0 nor 1")
        return bool(flag)


def decode_dump(payload: memoryview) -> list[RouterEvent]:
    """Return the events of a dump, parents first. O(bytes). Raises WireError."""
    reader = _Reader(payload)
    try:
        count = reader.count(_LEAST_EVENT_BYTES, len(payload))
        events = [_event(reader) for _ in range(count)]
    except struct.error as error:
        raise WireError(f"not a dump of Dynamo 1.0.2: {error}") from error
    if reader.left_bytes:
        raise WireError(f"not a dump of Dynamo 1.0.2: {reader.left_bytes} bytes too many")
    return events


def _event(reader: _Reader) -> RouterEvent:
    worker_id, event_id, kind = reader.read(_EVENT)
    if kind != _STORED:
        raise WireError(f"not a dump of Dynamo 1.0.2: an event of kind {kind}")
    parent = reader.read(_U64)[0] if reader.option() else None
    blocks = [_block(reader) for _ in range(reader.count(_BLOCK.size, MAX_EVENT_BLOCKS))]
    (dp_rank,) = reader.read(_U32)
    return RouterEvent(
        worker_id, CacheEvent(event_id, Change(stored=StoredBlocks(blocks, parent)), dp_rank)
    )


def _block(reader: _Reader) -> StoredBlock:
    block_hash, tokens_hash, has_objects = reader.read(_BLOCK)
    if has_objects:
        for _ in range(reader.count(16, MAX_EVENT_BLOCKS)):
            reader.read(_U64)
            for _ in range(reader.count(16, MAX_EVENT_BLOCKS)):
                reader.read(_U64)
                reader.read(_U64)
    return StoredBlock(block_hash, tokens_hash)
