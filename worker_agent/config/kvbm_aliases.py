"""The variables `DYN_KVBM_*` of Dynamo's block manager, mapped to settings.

A variable without a counterpart is rejected with the reason, so that it is not mistaken for
effective.
"""

from collections.abc import Mapping
from types import MappingProxyType

from router.errors import ConfigError
from router.runtime.process.aliases import Alias

PREFIX = "DYN_KVBM_"


def _switch(name: str, value: str) -> bool:
    match value.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off" | "":
            return False
    raise ConfigError(f"{PREFIX}{name}", repr(value), "true or false")


def _direct(value: str) -> Mapping[str, bool]:
    return {"disk_direct": not _switch("DISK_DISABLE_O_DIRECT", value)}


def _filter(value: str) -> Mapping[str, str]:
    is_off = _switch("DISABLE_DISK_OFFLOAD_FILTER", value)
    return {"disk_offload_policy": "all" if is_off else "frequency"}


def _metrics(value: str) -> Mapping[str, bool]:
    """Check the value; metrics are always available, at the agent's /metrics."""
    _switch("METRICS", value)
    return {}


def _alias(name: str, setting: str) -> Alias:
    return Alias(f"kvbm_{name.lower()}", f"{PREFIX}{name}", setting)


ALIASES = (
    _alias("CPU_CACHE_GB", "host_cache_gb"),
    _alias("CPU_CACHE_OVERRIDE_NUM_BLOCKS", "host_cache_blocks"),
    _alias("DISK_CACHE_GB", "disk_cache_gb"),
    _alias("DISK_CACHE_OVERRIDE_NUM_BLOCKS", "disk_cache_blocks"),
    _alias("DISK_CACHE_DIR", "disk_cache_dir"),
    _alias("DISK_ZEROFILL_FALLBACK", "disk_zero_fill"),
    _alias("MAX_TRANSFER_BATCH_SIZE", "offload_batch_blocks"),
    _alias("HOST_OFFLOAD_PREFIX_MIN_PRIORITY", "offload_min_priority"),
    Alias("kvbm_disable_o_direct", f"{PREFIX}DISK_DISABLE_O_DIRECT", meaning=_direct),
    Alias("kvbm_disable_filter", f"{PREFIX}DISABLE_DISK_OFFLOAD_FILTER", meaning=_filter),
    Alias("kvbm_metrics", f"{PREFIX}METRICS", meaning=_metrics),
)

_OBJECT = "the shared store is Redis: remote_cache_url"
_ONE_PROCESS = "leader and worker are one process here"

REFUSED = MappingProxyType(
    {
        f"{PREFIX}METRICS_PORT": "metrics are at /metrics of http_port",
        f"{PREFIX}MAX_CONCURRENT_TRANSFERS": "each tier has a thread, and two batches in progress",
        f"{PREFIX}LEADER_WORKER_INIT_TIMEOUT_SECS": _ONE_PROCESS,
        f"{PREFIX}LEADER_ZMQ_HOST": _ONE_PROCESS,
        f"{PREFIX}LEADER_ZMQ_PUB_PORT": _ONE_PROCESS,
        f"{PREFIX}LEADER_ZMQ_ACK_PORT": _ONE_PROCESS,
        **{
            f"{PREFIX}OBJECT_{name}": _OBJECT
            for name in (
                "ENABLED", "BUCKET", "ENDPOINT", "REGION", "ACCESS_KEY", "SECRET_KEY", "NUM_BLOCKS",
                "WRITE_THROUGH",
            )
        },
        f"{PREFIX}USE_OBJECT_OFFLOAD": _OBJECT,
        f"{PREFIX}ENABLE_NUMA": "the kernel places memory",
        f"{PREFIX}NCCL_MLA_MODE": "each process has one rank",
        f"{PREFIX}ENABLE_RECORD": "routers record: kv-router record",
        f"{PREFIX}KV_EVENTS_ENABLE_CONSOLIDATOR": "the agent next to an engine does: --tiers",
        f"{PREFIX}G2PB_ADMISSION_POLICY": "peers are not a tier",
    }
)  # fmt: skip
"""Variables without a counterpart, each with the reason."""
