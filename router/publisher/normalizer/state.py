"""The state of a normaliser as one string of bytes, to continue from by replay.

"KVRN" │ version u16 │ reserved u16 │ body length u64 │ checksum u64 │ body
                                       XXH3-64 of the body            msgpack, little-endian
"""

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct, msgpack
from xxhash import xxh3_64, xxh3_64_intdigest

from router.protocol.values import (
    UNREADABLE,
    Doubt,
    HashArray,
    Identity,
    pack_hashes,
    unpack_hashes,
)
from router.publisher.engine_events.batch import EngineStored
from router.publisher.errors import NormalizerStateError
from router.publisher.hybrid.class_blocks import ClassBlocks, SavedClasses
from router.publisher.hybrid.groups import AttentionGroups, Group
from router.publisher.normalizer.block_registry import BlockRegistry
from router.publisher.normalizer.contexts import Context
from router.publisher.normalizer.degraded_reasons import DegradedReasons
from router.publisher.normalizer.orphans import OrphanBlocks
from router.publisher.normalizer.refcounted_journal import SavedCounts
from router.publisher.normalizer.settings import NormalizerCounts

MAGIC = b"KVRN"
VERSION = 2

_HEADER = struct.Struct("<4sHHQQ")

BIN_HEAD = struct.Struct(">BI")
"""The head that msgpack writes before bytes of any length; its first byte is `BIN`."""

BIN = 0xC6
NO_BYTES = b"\xc4\0"

SavedParts: TypeAlias = Sequence[bytes | memoryview]
"""A string of bytes in parts, the large ones of which are views. Copying them, and holding the
interpreter lock meanwhile, would take longer than writing them.
"""


class NormalizerState(Struct, frozen=True, array_like=True):
    """The whole state of a normaliser. `rows`, `words` and `uses` are packed as in the kernels."""

    identity: Identity
    words: bytes
    rows: bytes
    contexts: list[Context]
    uses: bytes
    block_counts: SavedCounts
    groups: dict[int, Group]
    classes: SavedClasses
    held_back: list[dict[str, Any]]
    doubts: int
    may_have_lower_tiers: bool
    counts: NormalizerCounts


_decoder = msgpack.Decoder(NormalizerState)


def state_parts(state: NormalizerState, rows: HashArray) -> SavedParts:
    """Return the encoded state with the rows inserted as a view. O(blocks known)."""
    body = msgpack.encode(state)
    before = 1 + len(msgpack.encode(state.identity)) + len(msgpack.encode(state.words))
    packed: memoryview = rows.view(np.uint8).data
    parts: list[bytes | memoryview] = [
        body[:before],
        BIN_HEAD.pack(BIN, len(packed)),
        packed,
        body[before + len(NO_BYTES) :],
    ]
    size, checksum = size_and_checksum(parts)
    return [_HEADER.pack(MAGIC, VERSION, 0, size, checksum), *parts]


def size_and_checksum(parts: SavedParts) -> tuple[int, int]:
    """Return the size and checksum of the string that the parts form. O(bytes)."""
    hashing = xxh3_64()
    for part in parts:
        hashing.update(part)
    return sum(map(len, parts)), hashing.intdigest()


def decode_state(payload: bytes, identity: Identity) -> NormalizerState:
    """Decode a state. O(blocks known).

    Raises NormalizerStateError unless it is complete, undamaged, of this version and of this
    identity.
    """
    if len(payload) < _HEADER.size or payload[:4] != MAGIC:
        raise NormalizerStateError("not a saved state")
    _, version, _, length, checksum = _HEADER.unpack_from(payload)
    if version != VERSION:
        raise NormalizerStateError(f"version {version} (allowed: {VERSION})")
    body = memoryview(payload)[_HEADER.size :]
    if len(body) != length:
        raise NormalizerStateError(f"{len(body)} bytes of {length}")
    if xxh3_64_intdigest(body) != checksum:
        raise NormalizerStateError("its checksum differs: it is damaged")
    try:
        state = _decoder.decode(body)
    except UNREADABLE as error:
        raise NormalizerStateError(f"its body is malformed: {error}") from error
    if state.identity != identity:
        raise NormalizerStateError(f"of {state.identity} (allowed: {identity})")
    return state


def normalizer_state(
    identity: Identity,
    names: BlockRegistry,
    groups: AttentionGroups,
    classes: ClassBlocks,
    held_back: OrphanBlocks,
    doubts: DegradedReasons,
    counts: NormalizerCounts,
) -> NormalizerState:
    """Return the state of a normaliser's parts, without the rows of its map."""
    words, _ = names.map.saved()
    contexts = names.contexts
    return NormalizerState(
        identity=identity,
        words=words.tobytes(),
        rows=b"",
        contexts=contexts.listed(),
        uses=contexts.uses[: len(contexts)].tobytes(),
        block_counts=names.journal.saved(),
        groups=groups.listed(),
        classes=classes.saved(),
        held_back=[_packed_event(event) for event in held_back.events()],
        doubts=doubts.kept | (Doubt.HYBRID if doubts.has_full_only else 0),
        may_have_lower_tiers=doubts.may_have_lower_tiers,
        counts=counts,
    )


def put_back(
    state: NormalizerState,
    names: BlockRegistry,
    groups: AttentionGroups,
    classes: ClassBlocks,
    held_back: OrphanBlocks,
    doubts: DegradedReasons,
    now_s: float,
) -> None:
    """Restore a state into new parts, and publish it to their journal. O(blocks known).

    Raises NormalizerStateError, without a change.
    """
    names.contexts.load(state.contexts, np.frombuffer(state.uses, np.uint32))
    names.map.load(np.frombuffer(state.words, "<u8"), np.frombuffer(state.rows, "<u8"))
    names.journal.load(state.block_counts)
    names.publish_all()
    groups.load(state.groups)
    classes.load(state.classes)
    for fields in state.held_back:
        held_back.add(_unpacked_event(fields), now_s)
    doubts.kept = state.doubts & ~Doubt.HYBRID
    doubts.has_full_only |= bool(state.doubts & Doubt.HYBRID)
    doubts.may_have_lower_tiers = state.may_have_lower_tiers


def _packed_event(event: EngineStored) -> dict[str, Any]:
    fields = msgspec.structs.asdict(event)
    fields["block_hashes"] = pack_hashes(event.block_hashes)
    fields["tokens"] = event.tokens.astype("<u4").tobytes()
    del fields["local_hashes"]  # Publishers that send them cannot replay: no state is saved.
    return fields


def _unpacked_event(fields: dict[str, Any]) -> EngineStored:
    arrays = {
        "block_hashes": unpack_hashes(fields["block_hashes"]),
        "tokens": np.frombuffer(fields["tokens"], "<u4"),
    }
    return EngineStored(**{**fields, **arrays})
