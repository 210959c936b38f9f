"""What operators ask of an agent's tiers, and are told: over HTTP, and over NATS by `method`.

Source: the controller of Dynamo's block manager.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from worker_agent.blocks.levels import CacheLevel
from worker_agent.blocks.pool_values import PoolCounters
from worker_agent.offload.probe import TierProbe

DpRank = Annotated[int, Meta(ge=0, le=65_535)]
MAX_HASHES = 65_536


class StatusQuery(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method",
    tag="tiers_status",
):  # fmt: skip
    """How are these tiers? All that are not named."""

    dp_rank: DpRank | None = None
    level: CacheLevel | None = None
    hashes: bool = False
    """Also which blocks they hold, as routers name them; G4's are not known."""


class ResetPool(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method",
    tag="tiers_reset_pool",
):  # fmt: skip
    """Give up everything in a tier, of one rank or of all, unless blocks are in use."""

    level: CacheLevel
    dp_rank: DpRank | None = None


class ResetBlocks(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method",
    tag="tiers_reset_blocks",
):  # fmt: skip
    """Give up these blocks in a tier, as far as nobody uses them."""

    level: CacheLevel
    sequence_hashes: Annotated[list[int], Meta(max_length=MAX_HASHES)]
    """As routers name them."""
    dp_rank: DpRank | None = None


class ResetAll(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method",
    tag="tiers_reset_all",
):  # fmt: skip
    """Give up everything in every tier, where no blocks are in use."""

    dp_rank: DpRank | None = None


TierCommand: TypeAlias = StatusQuery | ResetPool | ResetBlocks | ResetAll


class TierTraffic(Struct, frozen=True, kw_only=True):
    """What went through a tier below the device since the agent started."""

    stored_blocks: int
    """Taken from the tier above."""
    stored_bytes: int
    store_s: float
    """Time spent storing."""
    store_calls: int
    store_failures: int
    """Blocks."""
    loaded_blocks: int
    """Given to the device."""
    loaded_bytes: int
    load_s: float
    load_failures: int
    """Blocks."""
    corrupt_blocks: int
    """Given up: their bytes were not what was stored."""
    adopted_blocks: int
    """Taken over from a former life."""
    unproven_blocks: int
    """Left there: they could not be read, or not in time."""
    waiting_blocks: int
    """To be stored."""
    dropped_blocks: int
    """They waited, and gave way to more urgent ones, or to the end."""
    pace_bytes_per_s: float
    """At most so many are stored now."""
    is_broken: bool
    """It failed, and is asked no more."""
    probe: TierProbe | None
    """What was measured at start; None where it could not be."""


class LevelReport(Struct, frozen=True, kw_only=True):
    """A tier of a rank."""

    dp_rank: int
    level: CacheLevel
    num_blocks: int
    active_blocks: int
    """In use."""
    inactive_blocks: int
    """Kept, and not in use."""
    empty_blocks: int
    private_blocks: int = 0
    """In use, and to be named."""
    pool: PoolCounters | None = None
    """What its pool did since the agent started; none of G4, which is everybody's."""
    traffic: TierTraffic | None = None
    """None of the device, which is where all of it begins and ends."""
    active_hashes: list[int] | None = None
    inactive_hashes: list[int] | None = None


class StatusReply(Struct, frozen=True):
    """Every tier that was asked for."""

    worker_id: int
    tiers: list[LevelReport]
    advice: list[str]
    """What whoever configured the tiers should know."""


class RankReset(Struct, frozen=True):
    """What became of a rank's tiers."""

    dp_rank: int
    reset: list[CacheLevel]
    failed: dict[CacheLevel, str]
    """Why not."""
    skipped_unconfigured: list[CacheLevel]


class ResetReply(Struct, frozen=True):
    """What became of every rank that was asked for."""

    worker_id: int
    ranks: list[RankReset]


class BlocksReset(Struct, frozen=True):
    """What became of blocks of a rank."""

    dp_rank: int
    reset_blocks: list[int]
    not_found: list[int]
    not_reset: list[int]
    """Somebody uses them."""


class BlocksReply(Struct, frozen=True):
    """What became of blocks of every rank that was asked for."""

    worker_id: int
    level: CacheLevel
    ranks: list[BlocksReset]


TierReply: TypeAlias = StatusReply | ResetReply | BlocksReply
