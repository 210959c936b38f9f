"""The values that all messages consist of, and their decoding with one error type."""

import enum
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from router.errors import WireError

T = TypeVar("T")


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All exceptions of a msgspec decoder: it also raises two of Python's own for invalid bytes."""


def decode(decoder: Callable[[bytes], T], payload: bytes) -> T:
    """Apply a msgspec decoder to bytes from the bus. Raises WireError, and nothing else."""
    try:
        return decoder(payload)
    except UNREADABLE as error:
        raise WireError(str(error)) from error


_MOST_DIGITS = 20


def number_in(digits: str, most: int) -> int | None:
    """Return the number that ASCII digits stand for.

    Returns None for any other text and for a number above `most`. Python itself raises ValueError
    for 4,300 digits and more.
    """
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS):
        return None
    number = int(digits)
    return number if number <= most else None


HashArray: TypeAlias = npt.NDArray[np.uint64]
"""Sequence hashes, in prefix order if they form a prompt. Shape: (blocks,)."""

SCHEME = "xxh3-64-1337"
"""The hash scheme of this version (seed 1337, LoRA and salt in the seed)."""

KEYED_SCHEME = "keyed-xxh3-v1"
"""The scheme of keyed names of blocks in bookings."""

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

I64_MAX = 2**63 - 1

UInt: TypeAlias = Annotated[int, Meta(ge=0, le=I64_MAX)]
"""A number that fits arithmetic and every column."""

U64: TypeAlias = Annotated[int, Meta(ge=0)]
"""A hash, a digest or a foreign id, on which no arithmetic is done."""

MAX_DP_RANK = 65_535
DpRank: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_DP_RANK)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=U32_MAX)]
BlockHash: TypeAlias = Annotated[int, Meta(ge=-(2**63))]
"""A hash in callers' form: a signed or unsigned number of 64 bits."""

TokenCount: TypeAlias = Annotated[int, Meta(ge=0, le=U32_MAX)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Endpoint: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Taint: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]

Role: TypeAlias = Literal["aggregated", "prefill", "decode"]
"""The part of the work that a worker does: all of it, prompts for others, or what follows them."""

Phase: TypeAlias = Literal["aggregated", "prefill", "decode"]
"""The part of a request to be done."""


class Tier(enum.IntEnum):
    """The location of a block, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


TIERS = len(Tier)

FASTEST_TIER = tuple(
    next((tier for tier in range(TIERS) if mask >> tier & 1), TIERS) for mask in range(1 << TIERS)
)
"""The fastest tier of each tier mask (bit t: held in tier t); TIERS for none."""


class Identity(Struct, frozen=True, array_like=True, gc=False, cache_hash=True):
    """The hash scheme of a worker's blocks; two workers compare only under equal identities."""

    scheme: str
    block_size: Annotated[int, Meta(ge=1, le=65_536)]
    eagle: bool = False


class Rank(Struct, frozen=True, array_like=True, order=True, gc=False, cache_hash=True):
    """A data-parallel rank of a worker: the unit of selection, and the holder of blocks."""

    worker_id: UInt
    dp_rank: DpRank

    def __str__(self) -> str:
        return f"{self.worker_id}.{self.dp_rank}"


def ranks_of(worker_id: int, start_rank: int, size: int) -> tuple[Rank, ...]:
    """Return the data-parallel ranks of a worker, in order."""
    return tuple(Rank(worker_id, start_rank + i) for i in range(size))


class StreamPosition(Struct, frozen=True, array_like=True):
    """A position in a stream: the stream's time of creation, and the last sequence read."""

    created: str
    sequence: UInt


class Scope(Struct, frozen=True, order=True, gc=False, cache_hash=True):
    """The unit of state: workers of different scopes never meet in one decision."""

    model_name: Name = "default"
    routing_group: Name = "default"


PerTier: TypeAlias = tuple[UInt, UInt, UInt, UInt]
Digests: TypeAlias = tuple[U64, U64, U64, U64]


class Doubt(enum.IntFlag):
    """The reasons why a rank's agent cannot guarantee what it reports of the engine's blocks."""

    ORPHANS = 1
    HYBRID = 2
    EVENTS_LOST = 4
    COPIES = 8
    LOWER_TIERS = 16
    UNREADABLE = 32
    UNCOUNTED = 64
    UNKNOWN_FIELDS = 128


_DOUBT_TEXTS = {
    Doubt.ORPHANS: "blocks with unknown parents",
    Doubt.HYBRID: "hybrid model: overlap is an upper bound",
    Doubt.EVENTS_LOST: "engine events lost, and no replay",
    Doubt.COPIES: "more copies reported than the engine has blocks",
    Doubt.LOWER_TIERS: "lower tiers unknown since the device's was cleared",
    Doubt.UNREADABLE: "engine events dropped as unreadable",
    Doubt.UNCOUNTED: "a copy cannot be distinguished from a re-announcement",
    Doubt.UNKNOWN_FIELDS: "unknown fields in engine events",
}


@lru_cache(maxsize=1024)
def doubt_text(doubts: int, hybrid_problem: str = "") -> str:
    """Return doubts as text; doubts unknown to this version are given by number.

    `hybrid_problem`: the problem of a known layout, which takes the place of `Doubt.HYBRID`.
    """
    named = []
    if hybrid_problem:
        named, doubts = [f"hybrid model: {hybrid_problem}"], doubts & ~Doubt.HYBRID
    texts = named + [text for doubt, text in _DOUBT_TEXTS.items() if doubts & doubt]
    unknown = doubts & ~sum(_DOUBT_TEXTS)
    return "; ".join([*texts, f"doubt {unknown}"] if unknown else texts)


class HeldState(Struct, frozen=True, array_like=True):
    """The blocks of a rank after a message, in a summary that travels with each one.

    `holes[t]`: held blocks with a parent that is not held, a block counting as held if its fastest
    tier is at most t; 0 means that membership along every prompt is monotone. `counts[t]` and
    `digests[t]` (XOR of a mix of the hashes) describe tier t alone. `doubts`: a sum of `Doubt`s; 0
    if the rank's agent guarantees the rest.
    """

    holes: PerTier = (0, 0, 0, 0)
    counts: PerTier = (0, 0, 0, 0)
    digests: Digests = (0, 0, 0, 0)
    doubts: UInt = 0


_LITTLE_ENDIAN = np.dtype("<u8")


def pack_hashes(hashes: HashArray) -> bytes:
    """Return hashes as little-endian u64."""
    return hashes.astype(_LITTLE_ENDIAN, copy=False).tobytes()


def unpack_hashes(packed: bytes) -> HashArray:
    """Return packed hashes as a read-only array, without a copy.

    Their length is checked at decoding.
    """
    return np.frombuffer(packed, dtype="<u8")
