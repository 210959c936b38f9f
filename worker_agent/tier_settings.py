"""What an agent can be told of its tiers below the device."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from router.contradictions import Rule, check_rules
from worker_agent.common_config import AgentConfig
from worker_agent.offload_rule import OffloadRule

GB = 10**9


class TierSettings(AgentConfig, frozen=True, kw_only=True):
    """Sizes and places of host, disk and shared store; by default there are none of them.

    A tier's size is its number of blocks, or, where that is 0, what fits in so many 10^9 bytes.
    """

    host_cache_blocks: Annotated[
        int, Meta(ge=0, description="blocks in host memory (G2), for each rank")
    ] = 0
    host_cache_gb: Annotated[
        float, Meta(ge=0, description="the same in 10^9 bytes, used if host_cache_blocks is 0")
    ] = 0.0
    host_cache_dir: Annotated[
        str,
        Meta(
            description=(
                "directory in memory (/dev/shm) where host blocks outlive the agent; "
                "empty: they do not"
            )
        ),
    ] = ""
    disk_cache_blocks: Annotated[
        int, Meta(ge=0, description="blocks on disk (G3), for each rank")
    ] = 0
    disk_cache_gb: Annotated[
        float, Meta(ge=0, description="the same in 10^9 bytes, used if disk_cache_blocks is 0")
    ] = 0.0
    disk_cache_dir: Annotated[
        str,
        Meta(
            description=(
                "directory where disk blocks outlive the agent; empty: a temporary "
                "one, and they do not"
            )
        ),
    ] = ""
    disk_zero_fill: Annotated[
        bool, Meta(description="write zeros if the file system cannot reserve space")
    ] = False
    disk_direct: Annotated[
        bool, Meta(description="bypass the page cache if the file system can")
    ] = True
    remote_cache_url: Annotated[
        str,
        Meta(
            description=(
                "Redis server that workers share as remote tier (G4), redis://…; empty: none"
            )
        ),
    ] = ""
    remote_cache_blocks: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "blocks in the remote tier, of all workers together; the oldest are dropped first"
            ),
        ),
    ] = 1_000_000
    remote_cache_ttl_s: Annotated[
        float, Meta(gt=0, description="how long blocks are kept in the remote tier")
    ] = 3600.0
    host_offload_policy: Annotated[
        OffloadRule,
        Meta(
            description=(
                "which blocks are stored in host memory: all, or only repeated ones, "
                "by frequency (counts, halved with time) or popularity (a sketch, "
                "halved with use)"
            )
        ),
    ] = "all"
    disk_offload_policy: Annotated[
        OffloadRule, Meta(description="which blocks are stored on disk; values as for host memory")
    ] = "all"
    remote_offload_policy: Annotated[
        OffloadRule,
        Meta(description="which blocks are stored in the remote tier; values as for host memory"),
    ] = "all"
    offload_batch_blocks: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description=(
                "blocks read or written by one call to a tier, which is never interrupted"
            ),
        ),
    ] = 16
    offload_waiting_blocks: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "blocks that may wait to be stored in a tier; beyond that, the least "
                "urgent are not stored"
            ),
        ),
    ] = 65_536
    offload_bytes_per_s: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "bandwidth of storing in a tier; a tenth of it while requests are decoded"
            ),
        ),
    ] = 2e9
    offload_drain_s: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "at shutdown: time to store blocks that wait for a tier that outlives the agent"
            ),
        ),
    ] = 10.0
    offload_min_priority: Annotated[
        int,
        Meta(
            ge=0,
            description="blocks are stored only up to the first with a lower priority than this",
        ),
    ] = 0
    adopt_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description=(
                "at start: time to check the blocks that a former agent left in the "
                "tiers; unchecked ones stay there"
            ),
        ),
    ] = 600.0
    onboard_timeout_s: Annotated[
        float, Meta(gt=0, description="blocks that a tier has not delivered by then are computed")
    ] = 5.0
    onboard_always: Annotated[
        bool, Meta(description="load blocks from tiers even if computing them would be faster")
    ] = False


def _without(key: str, *sizes: str) -> Rule[TierSettings]:
    why = "there is no such tier"

    def is_broken(config: TierSettings) -> bool:
        is_said = getattr(config, key) not in ("", 0, "all")
        return is_said and not any(getattr(config, size) for size in sizes)

    return Rule(key, sizes[0], is_broken, why)


_HOST = ("host_cache_blocks", "host_cache_gb")
_DISK = ("disk_cache_blocks", "disk_cache_gb")
RULES: tuple[Rule[TierSettings], ...] = (
    *(_without(k, *_HOST) for k in ("host_cache_dir", "host_offload_policy")),
    *(_without(k, *_DISK) for k in ("disk_cache_dir", "disk_zero_fill", "disk_offload_policy")),
    *(
        _without(k, "remote_cache_url")
        for k in ("remote_cache_blocks", "remote_cache_ttl_s", "remote_offload_policy")
    ),
    Rule(
        "remote_cache_url",
        "block_key_file",
        lambda c: bool(c.remote_cache_url) and not (c.block_key_file or c.block_key),
        "workers that share a store name blocks under the fleet's secret",
    ),
)


def check_tiers(config: TierSettings, sources: Mapping[str, str]) -> None:
    """Refuse settings of tiers that contradict each other. Raises ConfigError."""
    check_rules(RULES, config, sources)


def blocks_of(blocks: int, size_gb: float, block_bytes: int) -> int:
    """A tier's size in blocks: said, or what fits; 0: there is no such tier."""
    return blocks or int(size_gb * GB) // block_bytes
