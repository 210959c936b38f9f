"""The messages in which a block manager publishes its tiers' blocks to the agent beside its engine.

    manager ──▶ Hello │ Held │ Held │ … │ News │ News │ …     a connection: a snapshot, then changes

A message is its length (u32, little-endian) and msgpack. Blocks are given by their public sequence
hashes, with the parent of each (`held.path_heads`), because holes are counted over all sources. A
reader that missed a message connects again: messages are neither numbered nor repeated.
"""

from struct import Struct as Packing
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from router.errors import WireError
from router.protocol.events import CLEARED, STORED
from router.protocol.values import (
    UNREADABLE,
    DpRank,
    HashArray,
    Identity,
    Tier,
    pack_hashes,
    unpack_hashes,
)

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 22
PART_BLOCKS = 1 << 14
"""The number of blocks of a snapshot in one message: 512 KiB at most."""
HEAD_WORDS = 3

LENGTH = Packing("<I")


class Hello(Struct, frozen=True, array_like=True, tag=0):
    """The first message: the protocol version, the identity of the blocks, and the rank."""

    version: int
    identity: Identity
    dp_rank: DpRank


class Paths(Struct, frozen=True, array_like=True):
    """Blocks, and the heads of runs of consecutive ones: packed u64, three words for each head."""

    hashes: bytes
    heads: bytes


class Held(Struct, frozen=True, array_like=True, tag=1):
    """A part of the snapshot."""

    tier: Tier
    paths: Paths


class TierEvent(Struct, frozen=True, array_like=True):
    """A change: STORED; REMOVED, which has no heads; or CLEARED, which has no blocks."""

    kind: Annotated[int, Meta(ge=STORED, le=CLEARED)]
    tier: Tier
    paths: Paths


class TierEvents(Struct, frozen=True, array_like=True, tag=2):
    """Changes; the first message ends the snapshot. `is_all`: no more changes were pending."""

    events: list[TierEvent]
    is_all: bool


Message = Hello | Held | TierEvents

_decoder = msgspec.msgpack.Decoder(Message)


def paths_of(hashes: HashArray, heads: HashArray) -> Paths:
    """Pack hashes and heads."""
    return Paths(pack_hashes(hashes), pack_hashes(heads))


def unpacked(paths: Paths) -> tuple[HashArray, HashArray]:
    """Return hashes and heads. Raises WireError if they are malformed."""
    if len(paths.hashes) % 8 or len(paths.heads) % (8 * HEAD_WORDS):
        raise WireError(f"{len(paths.hashes)} and {len(paths.heads)} bytes of hashes and heads")
    hashes, heads = unpack_hashes(paths.hashes), unpack_hashes(paths.heads)
    firsts = heads[::HEAD_WORDS]
    if len(heads) and (firsts[0] or firsts[-1] >= len(hashes) or np.any(firsts[1:] <= firsts[:-1])):
        raise WireError("heads that are not in order")
    return hashes, heads


def parts(hashes: HashArray, heads: HashArray) -> list[Paths]:
    """Divide single blocks (`HeldBlocks.paths`) into parts of one message each."""
    rows = heads.reshape(-1, HEAD_WORDS).copy()
    rows[:, 0] %= PART_BLOCKS
    return [
        paths_of(hashes[first : first + PART_BLOCKS], rows[first : first + PART_BLOCKS].ravel())
        for first in range(0, len(hashes), PART_BLOCKS)
    ]


def encode(message: Message) -> bytes:
    """Return a message as it is sent, after its length."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Decode a message without its length. Raises WireError."""
    try:
        message: Message = _decoder.decode(body)
    except UNREADABLE as error:
        raise WireError(f"a malformed message: {error}") from error
    return message
