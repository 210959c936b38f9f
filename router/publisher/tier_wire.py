"""How a block manager tells the agent beside its engine what its tiers hold.

    manager ──▶ Hello │ Held │ Held │ … │ News │ News │ …     a connection: all it has, then changes

A message is its length (u32, little-endian) and msgpack. Blocks come by their public sequence
hashes, with what comes before each (`held.path_heads`), for holes are counted where the sources
meet. A reader that missed anything connects anew: nothing is numbered, and nothing repeated.
"""

from struct import Struct as Packing
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from router.errors import WireError
from router.protocol.events import CLEARED, STORED
from router.protocol.values import DpRank, HashArray, Identity, Tier, pack_hashes, unpack_hashes

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 22
PART_BLOCKS = 1 << 14
"""Of a snapshot, in one message: 512 KiB at most."""
HEAD_WORDS = 3

LENGTH = Packing("<I")


class Hello(Struct, frozen=True, array_like=True, tag=0):
    """Who speaks: of blocks named like this, for this rank."""

    version: int
    identity: Identity
    dp_rank: DpRank


class Paths(Struct, frozen=True, array_like=True):
    """Blocks, and where runs of consecutive ones begin: packed u64, three to a run."""

    hashes: bytes
    heads: bytes


class Held(Struct, frozen=True, array_like=True, tag=1):
    """A part of what is held."""

    tier: Tier
    paths: Paths


class TierEvent(Struct, frozen=True, array_like=True):
    """A change: STORED; REMOVED, which has no heads; or CLEARED, which has no blocks."""

    kind: Annotated[int, Meta(ge=STORED, le=CLEARED)]
    tier: Tier
    paths: Paths


class News(Struct, frozen=True, array_like=True, tag=2):
    """What changed. The first ends what is held. `is_all`: when it was sent there was no more."""

    events: list[TierEvent]
    is_all: bool


Message = Hello | Held | News

_decoder = msgspec.msgpack.Decoder(Message)


def paths_of(hashes: HashArray, heads: HashArray) -> Paths:
    """Packed."""
    return Paths(pack_hashes(hashes), pack_hashes(heads))


def unpacked(paths: Paths) -> tuple[HashArray, HashArray]:
    """Hashes and heads. Raises WireError for what is neither."""
    if len(paths.hashes) % 8 or len(paths.heads) % (8 * HEAD_WORDS):
        raise WireError(f"{len(paths.hashes)} and {len(paths.heads)} bytes of hashes and heads")
    hashes, heads = unpack_hashes(paths.hashes), unpack_hashes(paths.heads)
    firsts = heads[::HEAD_WORDS]
    if len(heads) and (firsts[0] or firsts[-1] >= len(hashes) or np.any(np.diff(firsts) < 1)):
        raise WireError("heads that are not in order")
    return hashes, heads


def parts(hashes: HashArray, heads: HashArray) -> list[Paths]:
    """Single blocks (`HeldBlocks.paths`) in as many messages as it takes."""
    rows = heads.reshape(-1, HEAD_WORDS).copy()
    rows[:, 0] %= PART_BLOCKS
    return [
        paths_of(hashes[first : first + PART_BLOCKS], rows[first : first + PART_BLOCKS].ravel())
        for first in range(0, len(hashes), PART_BLOCKS)
    ]


def encode(message: Message) -> bytes:
    """As it is sent, its length before it."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """A message without its length. Raises WireError."""
    try:
        message: Message = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"a malformed message: {error}") from error
    return message
