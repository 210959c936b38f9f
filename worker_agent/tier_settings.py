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

    host_cache_blocks: Annotated[int, Meta(ge=0, description="in host memory (G2), a rank")] = 0
    host_cache_gb: Annotated[
        float, Meta(ge=0, description="the same in 10^9 bytes, where host_cache_blocks is 0")
    ] = 0.0
    host_cache_dir: Annotated[
        str,
        Meta(description="directory of memory (/dev/shm): blocks outlive the agent; empty: no"),
    ] = ""
    disk_cache_blocks: Annotated[int, Meta(ge=0, description="on disk (G3), a rank")] = 0
    disk_cache_gb: Annotated[
        float, Meta(ge=0, description="the same in 10^9 bytes, where disk_cache_blocks is 0")
    ] = 0.0
    disk_cache_dir: Annotated[
        str,
        Meta(
            description="directory where they outlive the agent; empty: temporary, and they do not"
        ),
    ] = ""
    disk_zero_fill: Annotated[
        bool, Meta(description="where a file system cannot reserve room, write zeros")
    ] = False
    disk_direct: Annotated[
        bool, Meta(description="go past the page cache, where the file system can")
    ] = True
    remote_cache_url: Annotated[
        str, Meta(description="Redis that workers share (G4): redis://…; empty: none")
    ] = ""
    remote_cache_blocks: Annotated[
        int, Meta(ge=1, description="there, of all workers; what was stored first goes first")
    ] = 1_000_000
    remote_cache_ttl_s: Annotated[float, Meta(gt=0, description="they are kept there for")] = 3600.0
    host_offload_policy: Annotated[
        OffloadRule,
        Meta(
            description="what is worth a place there: all, or what was to be stored before, by "
            "frequency (counts, halved with time) or popularity (a sketch, halved with use)"
        ),
    ] = "all"
    disk_offload_policy: Annotated[OffloadRule, Meta(description="the same, of disk")] = "all"
    remote_offload_policy: Annotated[
        OffloadRule, Meta(description="the same, of the store that workers share")
    ] = "all"
    offload_batch_blocks: Annotated[
        int, Meta(ge=1, le=4096, description="go in one call of a tier, which nothing interrupts")
    ] = 16
    offload_waiting_blocks: Annotated[
        int, Meta(ge=1, description="wait for a tier; beyond, the least urgent are not stored")
    ] = 65_536
    offload_bytes_per_s: Annotated[
        float, Meta(gt=0, description="stored in a tier; a tenth of it while requests are decoded")
    ] = 2e9
    offload_drain_s: Annotated[
        float,
        Meta(
            ge=0, description="at the end, blocks that wait for a tier that outlives it are stored"
        ),
    ] = 10.0
    offload_min_priority: Annotated[
        int, Meta(ge=0, description="leading blocks of a prompt with less never leave the device")
    ] = 0
    adopt_timeout_s: Annotated[
        float,
        Meta(ge=0, description="at start, what a former life left is proven; the rest stays there"),
    ] = 600.0
    onboard_timeout_s: Annotated[
        float, Meta(gt=0, description="what has not come from a tier by then is computed")
    ] = 5.0
    onboard_always: Annotated[
        bool, Meta(description="load what a tier has even where computing it is sooner")
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
