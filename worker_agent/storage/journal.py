"""A journal of a tier's slots and their contents, in a file that outlives a killed process.

There is one record per slot. A record is invalidated before the slot's bytes change, and written
only after they have: an entry that is read back was complete when written. Its checksum shows
whether it still is.

    begin(slot) ─▶ bytes are written ─▶ commit(slot, name, checksum)
                          killed here: record stays invalid
"""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from worker_agent.blocks.names import BlockName
from worker_agent.storage.mapped_file import MappedFile

_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"kvblock1"
_RECORD = np.dtype(
    [
        ("has", "<u8"),
        ("identity", "V16"),
        ("parent_identity", "V16"),
        ("sequence_hash", "<u8"),
        ("parent_sequence_hash", "<u8"),
        ("checksum", "<u8"),
        ("seal", "<u8"),
    ]
)
_NAMED, _HAS_PARENT = 1, 2


class Entry(Struct, frozen=True):
    """The content of a slot when it was written."""

    slot: int
    name: BlockName
    checksum: int


class SlotJournal:
    """Records of `num_slots` slots.

    `fingerprint` identifies everything else that the bytes depend on; a journal with another one
    is reset.
    """

    __slots__ = ("_file", "_records")

    def __init__(self, path: Path, num_slots: int, fingerprint: int) -> None:
        """Open or create the file. Raises StorageError if it is not accessible."""
        size_bytes = _HEADER.size + num_slots * _RECORD.itemsize
        self._file = MappedFile(path, size_bytes)
        header = _HEADER.pack(_MAGIC, num_slots, fingerprint)
        if self._file.buffer[: _HEADER.size] != header:
            self._file.buffer[:] = header + bytes(size_bytes - _HEADER.size)
        self._records = np.frombuffer(self._file.buffer, dtype=_RECORD, offset=_HEADER.size)

    def written(self) -> list[int]:
        """Return the slots with a record, in order. O(slots), one instruction each."""
        slots: list[int] = np.flatnonzero(self._records["has"] & np.uint64(_NAMED)).tolist()
        return slots

    def entries(self, slots: Iterable[int]) -> list[Entry]:
        """Return the valid entries of these slots."""
        return [entry for slot in slots if (entry := self._read(slot)) is not None]

    def begin(self, slot: int) -> None:
        """Invalidate the record of a slot, before its bytes change."""
        self._records[slot] = np.zeros((), _RECORD)

    def commit(self, slot: int, name: BlockName, checksum: int) -> None:
        """Record the content of a slot, after its bytes are written."""
        has = _NAMED if name.parent_identity is None else _NAMED | _HAS_PARENT
        record = np.array(
            (
                has,
                name.identity,
                name.parent_identity or bytes(16),
                name.sequence_hash,
                name.parent_sequence_hash or 0,
                checksum,
                0,
            ),
            _RECORD,
        )
        record["seal"] = _seal(slot, record.tobytes())
        self._records[slot] = record

    def close(self) -> None:
        """Close the file, which remains."""
        del self._records
        self._file.close()

    def _read(self, slot: int) -> Entry | None:
        record = self._records[slot]
        has, identity, parent_identity, sequence_hash, parent_hash, checksum, seal = record.item()
        if not has & _NAMED or seal != _seal(slot, record.tobytes()):
            return None
        if not has & _HAS_PARENT:
            return Entry(slot, BlockName(identity, sequence_hash), checksum)
        name = BlockName(identity, sequence_hash, parent_identity, parent_hash)
        return Entry(slot, name, checksum)


def _seal(slot: int, record: bytes) -> int:
    """Return the checksum of a record and its slot, without the seal itself."""
    return xxh3_64_intdigest(record[: -_RECORD["seal"].itemsize], slot)
