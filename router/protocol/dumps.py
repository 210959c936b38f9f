"""The complete contents of an index, in the field's common format: `GET /dump`, JSON.

    {"model_name:routing_group": {"block_size": 16, "events": [
        {"worker_id": 1, "storage_tier": "device", "residency_domain": "worker", "event":
            {"event_id": 7, "dp_rank": 0, "data": {"stored":
                {"parent_hash": null, "start_position": null, "blocks":
                    [{"block_hash": …, "tokens_hash": null, "mm_extra_info": null}, …]}}}}, …]}}

There is one event per rank and tier, with its blocks in no particular order. `block_hash` is the
sequence hash, which identifies a block's path; the index keeps no local hashes, so `tokens_hash` is
null. `event_id` is the last event of the rank that the dump includes.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from msgspec import Meta, Struct, json

from router.errors import WireError
from router.protocol.values import U64, DpRank, HashArray, Rank, Scope, Tier, UInt, decode

TierName: TypeAlias = Literal["device", "host_pinned", "disk", "external"]

TIER_NAMES: tuple[TierName, ...] = ("device", "host_pinned", "disk", "external")
_TIERS = {name: Tier(number) for number, name in enumerate(TIER_NAMES)}


class DumpBlock(Struct, frozen=True, gc=False):
    """A block."""

    block_hash: U64
    tokens_hash: int | None = None
    mm_extra_info: Any = None


class StoredBlocks(Struct, frozen=True):
    """Blocks that are held."""

    parent_hash: int | None
    start_position: int | None
    blocks: list[DumpBlock]


class StoredData(Struct, frozen=True):
    """The data of an event. Dumps contain no other kind."""

    stored: StoredBlocks


class RankEvent(Struct, frozen=True):
    """The blocks of a rank."""

    event_id: UInt
    data: StoredData
    dp_rank: DpRank = 0


class DumpEvent(Struct, frozen=True):
    """The blocks of a rank in one tier."""

    worker_id: UInt
    storage_tier: TierName
    residency_domain: str
    event: RankEvent


class ScopeDump(Struct, frozen=True):
    """The blocks of one scope."""

    block_size: Annotated[int, Meta(ge=1)] | None
    events: list[DumpEvent]


Dump: TypeAlias = dict[str, ScopeDump]


class DumpedRank(Struct, frozen=True):
    """The contents of a dump about one rank."""

    scope_key: str
    block_size: int | None
    rank: Rank
    event_id: int
    blocks: Mapping[Tier, HashArray]


_decoder = json.Decoder(Dump)


def scope_key(scope: Scope) -> str:
    """Return the key of a scope in a dump."""
    return f"{scope.model_name}:{scope.routing_group}"


def dump_event(rank: Rank, tier: Tier, event_id: int, sequence_hashes: HashArray) -> DumpEvent:
    """Return the dump event of a rank's blocks in one tier. O(blocks)."""
    blocks = [DumpBlock(sequence_hash) for sequence_hash in sequence_hashes.tolist()]
    event = RankEvent(event_id, StoredData(StoredBlocks(None, None, blocks)), rank.dp_rank)
    return DumpEvent(rank.worker_id, TIER_NAMES[tier], "worker", event)


def decode_dump(payload: bytes) -> list[DumpedRank]:
    """Return the contents of a dump by rank.

    Raises WireError if the bytes are invalid, or if blocks are identified by other hashes than
    sequence hashes, which would never match.
    """
    dump = decode(_decoder.decode, payload)
    return [rank for key, scope in dump.items() for rank in _ranks(key, scope)]


def _ranks(key: str, scope: ScopeDump) -> Iterator[DumpedRank]:
    by_rank: dict[Rank, dict[Tier, DumpEvent]] = {}
    for event in scope.events:
        here = by_rank.setdefault(Rank(event.worker_id, event.event.dp_rank), {})
        tier = _TIERS[event.storage_tier]
        if tier in here:
            raise WireError(f"{key}: two events of one rank in tier {event.storage_tier}")
        here[tier] = event
    for rank, events in by_rank.items():
        event_ids = {event.event.event_id for event in events.values()}
        if len(event_ids) > 1:
            raise WireError(f"{key}: rank {rank} as of several events: {sorted(event_ids)}")
        blocks = {tier: _hashes(key, event) for tier, event in events.items()}
        yield DumpedRank(key, scope.block_size, rank, event_ids.pop(), blocks)


def _hashes(key: str, event: DumpEvent) -> HashArray:
    blocks = event.event.data.stored.blocks
    if any(block.tokens_hash is not None for block in blocks):
        raise WireError(f"{key}: blocks are named by an engine's hashes, not by sequence hashes")
    try:
        return np.array([block.block_hash for block in blocks], dtype=np.uint64)
    except OverflowError as error:
        raise WireError(f"{key}: a block_hash is larger than 64 bits") from error
