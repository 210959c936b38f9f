"""An index and its cursors as one string of bytes, to be kept and loaded again.

    "KVRX" │ version u16 │ reserved u16 │ body length u64 │ checksum u64 │ body
                                           XXH3-64 of the body            msgpack, little-endian

Only ranks that add up are in it. Loading decodes everything before it changes anything; a rank then
goes on from its cursor, as if its log had been read up to there. Ranks that are unknown here, or
known better, or under another scope or identity, are passed over.
"""

import struct

from msgspec import DecodeError, Struct, msgpack
from xxhash import xxh3_64_intdigest

from router.errors import SnapshotError
from router.indexer.base import HeldBlocks
from router.indexer.trusted_index import RankState, TrustedIndex
from router.protocol.events import TierBlocks
from router.protocol.values import Rank, pack_hashes, unpack_hashes

MAGIC = b"KVRX"
VERSION = 1

_HEADER = struct.Struct("<4sHHQQ")


class _RankSnapshot(Struct, frozen=True, array_like=True):
    state: RankState
    blocks: list[TierBlocks]


_decoder = msgpack.Decoder(list[_RankSnapshot])


def encode_snapshot(index: TrustedIndex) -> bytes:
    """All ranks of an index that add up, and what they hold. O(blocks held)."""
    ranks = {state.rank: _RankSnapshot(state, []) for state in index.rank_states()}
    for _, held in index.dump() if ranks else ():
        if held.rank in ranks:
            blocks = TierBlocks(held.tier, pack_hashes(held.sequence_hashes))
            ranks[held.rank].blocks.append(blocks)
    body = msgpack.encode(list(ranks.values()))
    return _HEADER.pack(MAGIC, VERSION, 0, len(body), xxh3_64_intdigest(body)) + body


def restore_snapshot(payload: bytes, index: TrustedIndex, now_s: float) -> list[Rank]:
    """Load a snapshot into an index; which of its blind ranks it filled. O(blocks).

    Raises SnapshotError for anything but a whole, undamaged snapshot of this version; the index
    is unchanged then.
    """
    restored = []
    for each in _decode(payload):
        blocks = [
            HeldBlocks(each.state.rank, held.tier, unpack_hashes(held.sequence_hashes))
            for held in each.blocks
        ]
        if index.resume(each.state, blocks, now_s):
            restored.append(each.state.rank)
    return restored


def _decode(payload: bytes) -> list[_RankSnapshot]:
    if len(payload) < _HEADER.size or payload[:4] != MAGIC:
        raise SnapshotError("it does not begin like one")
    _, version, _, length, checksum = _HEADER.unpack_from(payload)
    if version != VERSION:
        raise SnapshotError(f"version {version} (allowed: {VERSION})")
    body = memoryview(payload)[_HEADER.size :]
    if len(body) != length:
        raise SnapshotError(f"{len(body)} bytes of {length}")
    if xxh3_64_intdigest(body) != checksum:
        raise SnapshotError("its checksum differs: it is damaged")
    try:
        return _decoder.decode(body)
    except DecodeError as error:
        raise SnapshotError(f"its body is malformed: {error}") from error
