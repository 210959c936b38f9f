"""Configuration of a block manager: its worker, its block format, and its tiers.

Each part is checked when it is constructed; errors contain the field, the reason and the allowed
values.
"""

from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.errors import InvalidFieldError
from router.protocol.values import U64_MAX
from router.runtime.security.redis_access import OPEN_ACCESS, RedisAccess
from worker_agent.blocks.eviction.base import Eviction
from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.blocks.eviction.multi_lru import MultiLruEviction
from worker_agent.blocks.eviction.simple import LruEviction, PriorityEviction
from worker_agent.blocks.names import CacheLevel
from worker_agent.blocks.pool_values import Duplicates
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.strides import LayoutKind
from worker_agent.offload.policies import OffloadRule
from worker_agent.storage.base import Storage, StorageKind

DTYPE_BYTES = {
    "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2,
    "float32": 4, "float64": 8,
}  # fmt: skip
"""Torch's names of the allowed data types, with their width in bytes."""


class RuntimeConfig(Struct, frozen=True, kw_only=True):
    """The identity of a manager. Raises InvalidFieldError."""

    worker_id: int
    """From 0 to 2^64 - 1."""
    registers_layouts: bool = True
    """True if transfers and peers may refer to its layouts."""

    def __post_init__(self) -> None:
        if not 0 <= self.worker_id <= U64_MAX:
            raise InvalidFieldError("worker_id", f"{self.worker_id}", "0 to 2^64 - 1")


class CacheModel(Struct, frozen=True, kw_only=True):
    """The format of a model's blocks. Raises InvalidFieldError, LayoutError."""

    num_layers: int
    """At least 1."""
    page_size: int
    """Tokens of a block; a power of two."""
    inner_dim: int
    """Numbers of one token in one layer, on this tensor-parallel rank: heads × head size."""
    outer_dim: int = 2
    """2 for keys and values, 1 if one tensor holds both (MLA)."""
    dtype: str = "float16"
    """One of `DTYPE_BYTES`."""
    num_heads: int | None = None
    """Required if the order within a block matters; divides `inner_dim`."""
    name: str = "default"
    """Blocks of another model are never found, even with equal values otherwise."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidFieldError("dtype", f"{self.dtype!r}", ", ".join(DTYPE_BYTES))
        self.layout(num_blocks=1, alignment=1)

    def layout(self, num_blocks: int, alignment: int) -> LayoutConfig:
        """Return the layout of `num_blocks` blocks. Raises LayoutError."""
        return LayoutConfig(
            num_blocks=num_blocks,
            num_layers=self.num_layers,
            outer_dim=self.outer_dim,
            page_size=self.page_size,
            inner_dim=self.inner_dim,
            dtype_width_bytes=DTYPE_BYTES[self.dtype],
            alignment=alignment,
            num_heads=self.num_heads,
        )

    @property
    def fingerprint(self) -> int:
        """A hash of all fields; blocks stored under another fingerprint are not used."""
        return xxh3_64_intdigest(msgspec.json.encode(self))


class OnDevice(Struct, frozen=True):
    """Memory of a torch device: `cpu`, `cuda`, `cuda:1`."""

    device: str = "cpu"


class OnHost(Struct, frozen=True):
    """Memory of this process, pinned if there is a device to copy to asynchronously."""

    is_pinned: bool = True


class Shared(Struct, frozen=True):
    """Host memory by name, in a memory directory such as /dev/shm.

    With the journal next to it, blocks outlive the process.
    """

    path: Path


class InFile(Struct, frozen=True):
    """A file on a disk."""

    path: Path
    zero_fill: bool = False
    """True to write zeros if the file system cannot reserve space."""
    is_kept: bool = True
    """True if blocks outlive the process, by a journal; else the file is unlinked at once."""
    is_direct: bool = True
    """True to bypass the page cache, if the file system can."""


class Ready(Struct, frozen=True):
    """Existing memory or an existing file: one, or one per layer.

    The manager takes it over, and closes it.
    """

    storages: tuple[Storage, ...]


Place: TypeAlias = OnDevice | OnHost | Shared | InFile | Ready
_PLACES: dict[CacheLevel, tuple[type[Struct], ...]] = {
    CacheLevel.G1: (OnDevice, Ready),
    CacheLevel.G2: (OnHost, Shared, Ready),
    CacheLevel.G3: (InFile, Ready),
}


class TierLayout(Struct, frozen=True, kw_only=True):
    """The blocks of a tier."""

    num_blocks: int
    """At least 1."""
    place: Place
    """The memory of the blocks: the device's for G1, the host's for G2, a file for G3."""
    kind: LayoutKind = LayoutKind.CONTIGUOUS
    """The layout; only the device's may be separate for each layer.

    In other tiers no computation takes place, and a contiguous block is one copy.
    """
    alignment: int = 1
    """The alignment of the device's blocks in bytes; a power of two."""
    eviction: str | None = None
    """One of `EVICTIONS`; by default `lru` on the device, `lineage` elsewhere."""
    duplicates: Duplicates = Duplicates.REJECTED

    def check(self, level: CacheLevel) -> None:
        """Raise InvalidFieldError for a value that this level does not allow."""
        if self.num_blocks < 1:
            raise InvalidFieldError(f"{level}.num_blocks", f"{self.num_blocks}", "at least 1")
        places = _PLACES[level]
        if not isinstance(self.place, places):
            allowed = ", ".join(place.__name__ for place in places)
            raise InvalidFieldError(f"{level}.place", type(self.place).__name__, allowed)
        if self.eviction is not None and self.eviction not in EVICTIONS:
            raise InvalidFieldError(f"{level}.eviction", repr(self.eviction), ", ".join(EVICTIONS))
        if level is CacheLevel.G1:
            return
        if self.kind is not LayoutKind.CONTIGUOUS:
            raise InvalidFieldError(f"{level}.kind", self.kind, LayoutKind.CONTIGUOUS)
        if self.alignment != 1:
            raise InvalidFieldError(f"{level}.alignment", f"{self.alignment}", "1")
        if isinstance(self.place, Ready):
            self._check_ready(level, self.place)

    def _check_ready(self, level: CacheLevel, ready: Ready) -> None:
        kinds = [storage.kind for storage in ready.storages]
        is_right = {
            CacheLevel.G2: StorageKind.DISK not in kinds,
            CacheLevel.G3: kinds == [StorageKind.DISK],
        }
        if len(kinds) != 1 or not is_right[level]:
            allowed = "one memory of the host" if level is CacheLevel.G2 else "one file"
            raise InvalidFieldError(f"{level}.place", ", ".join(kinds) or "nothing", allowed)


EVICTIONS = ("lru", "priority", "multi_lru", "lineage")


def eviction_of(name: str, num_blocks: int) -> Eviction:
    """Return the eviction policy of this name, for a pool of `num_blocks` blocks."""
    match name:
        case "lru":
            return LruEviction()
        case "priority":
            return PriorityEviction()
        case "multi_lru":
            return MultiLruEviction(num_blocks)
        case _:
            return LineageEviction()


class RemoteStore(Struct, frozen=True, kw_only=True):
    """A Redis that workers share (G4). Raises InvalidFieldError."""

    url: str
    """`redis://`, `rediss://` or `unix://`."""
    access: RedisAccess = OPEN_ACCESS
    max_blocks: int
    """The limit over all workers, at least 1; the oldest blocks are evicted first."""
    namespace: str = "default"
    secret: bytes = b""
    """Of all workers that share it, for seals that writers of Redis cannot forge; else empty."""
    ttl_s: float = 3600.0
    """Above 0."""
    timeout_s: float = 1.0
    """The timeout of a call; above 0."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise InvalidFieldError("G4.url", repr(self.url), "redis://, rediss:// or unix://")
        for field in ("max_blocks", "ttl_s", "timeout_s"):
            if getattr(self, field) <= 0:
                value = getattr(self, field)
                raise InvalidFieldError(f"G4.{field}", f"{value}", "above 0")


class Offload(Struct, frozen=True, kw_only=True):
    """The selection of offloaded blocks, and the pace. Raises InvalidFieldError."""

    batch_blocks: int = 16
    """Blocks in one call of a tier, which is not interruptible."""
    max_waiting_blocks: int = 65_536
    """The limit of blocks waiting for each tier; beyond it, the least urgent are not stored."""
    store_bytes_per_s: float = 2e9
    """The bandwidth into each tier; a tenth of it while requests are decoded."""
    min_priority: int = 0
    """Only a prompt's leading blocks of at least this priority leave the device."""
    host_rule: OffloadRule = "all"
    disk_rule: OffloadRule = "all"
    remote_rule: OffloadRule = "all"
    """The rules for storing a block in each tier."""
    drain_s: float = 10.0
    """The time at shutdown to store waiting blocks in tiers that outlive the process."""
    adopt_timeout_s: float = 600.0
    """The time to verify blocks of an earlier process; unverified ones are left in place."""
    loads_always: bool = False
    """True to load blocks even if computing them would be faster."""

    def __post_init__(self) -> None:
        for field in ("batch_blocks", "max_waiting_blocks", "store_bytes_per_s"):
            if getattr(self, field) <= 0:
                raise InvalidFieldError(field, f"{getattr(self, field)}", "above 0")
        for field in ("drain_s", "adopt_timeout_s"):
            if getattr(self, field) < 0:
                raise InvalidFieldError(field, f"{getattr(self, field)}", "0 or more")


class BlockManagerConfig(Struct, frozen=True, kw_only=True):
    """The whole configuration. Raises InvalidFieldError, LayoutError, before any allocation."""

    runtime: RuntimeConfig
    model: CacheModel
    device: TierLayout | None = None
    host: TierLayout | None = None
    disk: TierLayout | None = None
    remote: RemoteStore | None = None
    offload: Offload = Offload()

    def __post_init__(self) -> None:
        if not self.tiers:
            raise InvalidFieldError("device", "no tier at all", "one of device, host, disk")
        for level, tier in self.tiers.items():
            tier.check(level)
            self.model.layout(tier.num_blocks, tier.alignment)

    @property
    def tiers(self) -> dict[CacheLevel, TierLayout]:
        """The configured tiers, fastest first."""
        each = zip(CacheLevel, (self.device, self.host, self.disk), strict=False)
        return {level: tier for level, tier in each if tier is not None}
