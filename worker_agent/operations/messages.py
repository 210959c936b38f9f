"""Commands and replies of tier control: over HTTP, and over NATS by `method`.

Source: the controller of Dynamo's block manager.
"""

from typing import Annotated, Any, Protocol, TypeAlias

from msgspec import Meta, Raw, Struct

from worker_agent.blocks.names import CacheLevel
from worker_agent.blocks.pool_values import PoolCounters
from worker_agent.offload.probe import TierProbe

DpRank = Annotated[int, Meta(ge=0, le=65_535)]
MAX_HASHES = 65_536
BODY_LIMIT_BYTES = 2 * 1024 * 1024


class StatusQuery(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method",
    tag="tiers_status",
):  # fmt: skip
    """A query for the status of tiers: of all ranks and levels that are not restricted."""

    dp_rank: DpRank | None = None
    level: CacheLevel | None = None
    hashes: bool = False
    """Include the hashes of held blocks, as routers name them; G4's are not known."""


class ResetPool(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method",
    tag="tiers_reset_pool",
):  # fmt: skip
    """A command to remove all blocks of a tier, of one rank or of all, if none is in use."""

    level: CacheLevel
    dp_rank: DpRank | None = None


class ResetBlocks(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method",
    tag="tiers_reset_blocks",
):  # fmt: skip
    """A command to remove these blocks from a tier, except those in use."""

    level: CacheLevel
    sequence_hashes: Annotated[list[int], Meta(max_length=MAX_HASHES)]
    """Hashes as routers name them."""
    dp_rank: DpRank | None = None


class ResetAll(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method",
    tag="tiers_reset_all",
):  # fmt: skip
    """A command to remove all blocks of every tier that has none in use."""

    dp_rank: DpRank | None = None


TierCommand: TypeAlias = StatusQuery | ResetPool | ResetBlocks | ResetAll


class TierTraffic(Struct, frozen=True, kw_only=True):
    """Traffic of a tier below the device since the agent started."""

    stored_blocks: int
    """Blocks taken from the tier above."""
    stored_bytes: int
    store_s: float
    """Time spent storing."""
    store_calls: int
    store_failures: int
    """Number of blocks."""
    loaded_blocks: int
    """Blocks copied to the device."""
    loaded_bytes: int
    load_s: float
    load_failures: int
    """Number of blocks."""
    corrupt_blocks: int
    """Blocks dropped because their bytes differed from what was stored."""
    adopted_blocks: int
    """Blocks recovered from an earlier incarnation."""
    unproven_blocks: int
    """Persisted blocks not recovered: unreadable, or not read in time."""
    waiting_blocks: int
    """Blocks queued for storing."""
    dropped_blocks: int
    """Queued blocks dropped for more urgent ones, or at shutdown."""
    pace_bytes_per_s: float
    """The present limit of storing."""
    is_broken: bool
    """True if it failed, and is no longer used."""
    probe: TierProbe | None
    """Measurements at start; None if measuring failed."""


class LevelReport(Struct, frozen=True, kw_only=True):
    """The state of one tier of a rank."""

    dp_rank: int
    level: CacheLevel
    num_blocks: int
    active_blocks: int
    """Blocks in use."""
    inactive_blocks: int
    """Blocks kept, but not in use."""
    empty_blocks: int
    private_blocks: int = 0
    """Blocks in use that are not registered yet."""
    pool: PoolCounters | None = None
    """Counters of its pool since the agent started; None for G4, which is shared."""
    traffic: TierTraffic | None = None
    """Its traffic; None for the device, where all transfers begin and end."""
    active_hashes: list[int] | None = None
    inactive_hashes: list[int] | None = None


class StatusReply(Struct, frozen=True):
    """The state of every requested tier."""

    worker_id: int
    tiers: list[LevelReport]
    advice: list[str]
    """Advice on the configuration of the tiers."""


class RankReset(Struct, frozen=True):
    """The outcome of a reset of a rank's tiers."""

    dp_rank: int
    reset: list[CacheLevel]
    failed: dict[CacheLevel, str]
    """The reason for each failed level."""
    skipped_unconfigured: list[CacheLevel]


class ResetReply(Struct, frozen=True):
    """The outcome of a reset for every requested rank."""

    worker_id: int
    ranks: list[RankReset]


class BlocksReset(Struct, frozen=True):
    """The outcome of a reset of single blocks of a rank."""

    dp_rank: int
    reset_blocks: list[int]
    not_found: list[int]
    not_reset: list[int]
    """Blocks that are in use."""


class BlocksReply(Struct, frozen=True):
    """The outcome of a reset of single blocks for every requested rank."""

    worker_id: int
    level: CacheLevel
    ranks: list[BlocksReset]


TierReply: TypeAlias = StatusReply | ResetReply | BlocksReply


class TierCommands(Protocol):
    """The executor of commands: in the process of the tiers, or through the agent beside it."""

    async def answer(self, command: TierCommand) -> TierReply:
        """Execute a command. Raises KvRouterError for one that is refused or fails."""


# ── From an agent to the connector in its engine ────────────────────────────────────────────────


MAX_NAMED_PEERS = 32


class AnnouncedBlockset(Struct, frozen=True):
    """A blockset, of the engine at `address`, and the rank that announces it."""

    address: str
    worker_id: int
    dp_rank: int
    blockset: dict[str, Any]


class NamePeers(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True,
    tag_field="method", tag="name_peers",
):  # fmt: skip
    """A command to look for blocks at these engines; each is its first worker's address.

    `blocksets`: of those that announce one, for a rank's first worker, which replies with those
    that it refuses. `left_out`: those that it has refused, for the rank's other workers.
    `revision`: of all this, for `KeepPeers`.
    """

    addresses: Annotated[list[str], Meta(max_length=MAX_NAMED_PEERS)]
    blocksets: Annotated[list[AnnouncedBlockset], Meta(max_length=MAX_NAMED_PEERS)] = []
    left_out: Annotated[list[str], Meta(max_length=MAX_NAMED_PEERS)] = []
    revision: Annotated[str, Meta(max_length=64)] = ""


class KeepPeers(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method",
    tag="keep_peers",
):  # fmt: skip
    """A command to go on with the peers of this revision, if those are the ones named last."""

    revision: Annotated[str, Meta(min_length=1, max_length=64)]


class PeersNamed(Struct, frozen=True):
    """The reply to `NamePeers`, and to `KeepPeers`: of what was named last.

    `left_out`: the addresses of the engines that are not asked for blocks. `revision`: empty in a
    process to which nothing was named.
    """

    left_out: list[str] = []
    revision: str = ""


class BlocksetsQuery(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method",
    tag="blocksets",
):  # fmt: skip
    """A query for the blocksets of the worker's rank: its own, and those of others.

    `addresses`: where others reach its blocks, as announced; empty: where it listens.
    """

    addresses: list[str] = []


PeerCommand: TypeAlias = NamePeers | KeepPeers | BlocksetsQuery
EngineCommand: TypeAlias = TierCommand | PeerCommand


class EngineRefusal(Struct, frozen=True):
    """An error of the engine's process: what it says, its code and its HTTP status."""

    reason: str
    code: str
    status: int


class EngineReply(Struct, frozen=True):
    """The reply to one command, or a refusal: a TierReply, PeersNamed, or RankBlocksets."""

    reply: Raw = Raw(b"null")
    refusal: EngineRefusal | None = None
