"""An agent's settings of the tiers below the device."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Struct

from router.runtime.process.setting_rules import ConflictRule, check_rules
from router.runtime.process.settings import COMMON, about
from worker_agent.offload.policies import OffloadRule

GB = 10**9


class TierSettings(Struct, frozen=True, kw_only=True):
    """Sizes and places of host, disk and shared store; by default there are none.

    The size of a tier is its number of blocks or, if that is 0, a size in 10^9 bytes.
    """

    GROUP: ClassVar[str] = "tiers"

    host_cache_blocks: Annotated[
        int, about("blocks in host memory (G2), for each rank", COMMON, ge=0)
    ] = 0
    host_cache_gb: Annotated[
        float, about("the same in 10^9 bytes, used if host_cache_blocks is 0", ge=0)
    ] = 0.0
    host_cache_dir: Annotated[
        str,
        about(
            "directory in memory (/dev/shm) where host blocks outlive the agent; empty: they do not"
        ),
    ] = ""
    disk_cache_blocks: Annotated[int, about("blocks on disk (G3), for each rank", COMMON, ge=0)] = 0
    disk_cache_gb: Annotated[
        float, about("the same in 10^9 bytes, used if disk_cache_blocks is 0", ge=0)
    ] = 0.0
    disk_cache_dir: Annotated[
        str,
        about(
            "folder where disk blocks outlive the agent; empty: a temporary one, and they do not",
            COMMON,
        ),
    ] = ""
    disk_zero_fill: Annotated[
        bool, about("write zeros if the file system cannot reserve space")
    ] = False
    disk_direct: Annotated[bool, about("bypass the page cache if the file system can")] = True
    remote_cache_url: Annotated[
        str,
        about(
            "Redis server that workers share as remote tier (G4), redis://…; empty: none", COMMON
        ),
    ] = ""
    remote_cache_username: Annotated[
        str, about("user (ACL) of the remote tier's Redis; empty: the default user")
    ] = ""
    remote_cache_password_file: Annotated[
        str, about("file with that user's password, read at every connection")
    ] = ""
    remote_cache_blocks: Annotated[
        int,
        about(
            "blocks in the remote tier, of all workers together; the oldest are dropped first", ge=1
        ),
    ] = 1_000_000
    remote_cache_ttl_s: Annotated[
        float, about("time to live of blocks in the remote tier", gt=0)
    ] = 3600.0
    host_offload_policy: Annotated[
        OffloadRule,
        about(
            "blocks stored in host memory: all, or only repeated ones, "
            "by frequency (counts, halved with time) or popularity (a sketch, "
            "halved with use)"
        ),
    ] = "all"
    disk_offload_policy: Annotated[
        OffloadRule, about("blocks stored on disk; values as for host memory")
    ] = "all"
    remote_offload_policy: Annotated[
        OffloadRule, about("blocks stored in the remote tier; values as for host memory")
    ] = "all"
    offload_batch_blocks: Annotated[
        int,
        about(
            "blocks read or written by one call to a tier, which is never interrupted",
            ge=1,
            le=4096,
        ),
    ] = 16
    offload_waiting_blocks: Annotated[
        int,
        about(
            "limit of blocks waiting to be stored in a tier; beyond that, the least "
            "urgent are not stored",
            ge=1,
        ),
    ] = 65_536
    offload_bytes_per_s: Annotated[
        float,
        about("bandwidth of storing in a tier; a tenth of it while requests are decoded", gt=0),
    ] = 2e9
    offload_drain_s: Annotated[
        float,
        about(
            "at shutdown: time to store blocks that wait for a tier that outlives the agent", ge=0
        ),
    ] = 10.0
    offload_min_priority: Annotated[
        int,
        about(
            "blocks are stored only up to the first with a lower priority than this",
            ge=0,
            unit="PRIORITY",
        ),
    ] = 0
    adopt_timeout_s: Annotated[
        float,
        about(
            "at start: time to check the blocks that an earlier agent left in the "
            "tiers; unchecked ones stay there",
            ge=0,
        ),
    ] = 600.0
    onboard_timeout_s: Annotated[
        float, about("blocks that a tier has not delivered by then are computed", gt=0)
    ] = 5.0
    onboard_always: Annotated[
        bool, about("load blocks from tiers even if computing them would be faster")
    ] = False


def _without(key: str, *sizes: str) -> ConflictRule:
    why = "the tier is not configured"

    def is_broken(config: Any) -> bool:
        is_said = getattr(config, key) not in ("", 0, "all")
        return is_said and not any(getattr(config, size) for size in sizes)

    return ConflictRule(key, sizes[0], is_broken, why)


_HOST = ("host_cache_blocks", "host_cache_gb")
_DISK = ("disk_cache_blocks", "disk_cache_gb")
RULES: tuple[ConflictRule, ...] = (
    *(_without(k, *_HOST) for k in ("host_cache_dir", "host_offload_policy")),
    *(_without(k, *_DISK) for k in ("disk_cache_dir", "disk_zero_fill", "disk_offload_policy")),
    *(
        _without(k, "remote_cache_url")
        for k in ("remote_cache_blocks", "remote_cache_ttl_s", "remote_offload_policy")
    ),
    ConflictRule(
        "remote_cache_username",
        "remote_cache_password_file",
        lambda c: bool(c.remote_cache_username) and not c.remote_cache_password_file,
        "a user name needs a password",
    ),
    *(
        ConflictRule(
            key,
            "remote_cache_url",
            lambda c: not c.remote_cache_url or "@" in c.remote_cache_url,
            "there is no Redis to log in to, or its URL has a login already",
        )
        for key in ("remote_cache_username", "remote_cache_password_file")
    ),
    ConflictRule(
        "remote_cache_url",
        "block_key_file",
        lambda c: bool(c.remote_cache_url) and not (c.block_key_file or c.block_key),
        "the fleet's secret keys the blocks of a shared store",
    ),
)


def check_tiers(config: Struct, sources: Mapping[str, str]) -> None:
    """Raise ConfigError for settings of tiers that contradict each other."""
    check_rules(RULES, config, sources)


def blocks_of(blocks: int, size_gb: float, block_bytes: int) -> int:
    """Return a tier's size in blocks: the number, or those that fit; 0: no such tier."""
    return blocks or int(size_gb * GB) // block_bytes
