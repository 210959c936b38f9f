"""What a block manager is made of: whose it is, what a block is, and where blocks lie.

Each part is checked when it is made: which field, why, and what is allowed.
"""

from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from router.errors import InvalidFieldError
from router.protocol.values import U64_MAX
from worker_agent.blocks.eviction.base import Eviction
from worker_agent.blocks.eviction.by_priority import PriorityEviction
from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.blocks.eviction.lru import LruEviction
from worker_agent.blocks.eviction.multi_lru import MultiLruEviction
from worker_agent.blocks.levels import CacheLevel
from worker_agent.blocks.pool_values import Duplicates
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.strides import LayoutKind
from worker_agent.offload_rule import OffloadRule
from worker_agent.storage.base import Storage, StorageKind

DTYPE_BYTES = {
    "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2,
    "float32": 4, "float64": 8,
}  # fmt: skip
"""What a block's numbers may be, by torch's names, and how wide they are."""


class RuntimeConfig(Struct, frozen=True, kw_only=True):
    """Whose manager it is. Raises InvalidFieldError."""

    worker_id: int
    """0 to 2^64 - 1."""
    registers_layouts: bool = True
    """Whether transfers and peers may name its layouts."""

    def __post_init__(self) -> None:
        if not 0 <= self.worker_id <= U64_MAX:
            raise InvalidFieldError("worker_id", f"{self.worker_id}", "0 to 2^64 - 1")


class CacheModel(Struct, frozen=True, kw_only=True):
    """What a block of a model is. Raises InvalidFieldError, LayoutError."""

    num_layers: int
    """At least 1."""
    page_size: int
    """Tokens of a block; a power of two."""
    inner_dim: int
    """Numbers of one token in one layer, on this tensor-parallel rank: heads × head size."""
    outer_dim: int = 2
    """2 for keys and values, 1 where one tensor holds both (MLA)."""
    dtype: str = "float16"
    """One of `DTYPE_BYTES`."""
    num_heads: int | None = None
    """Where the order within a block has to be known; divides `inner_dim`."""
    name: str = "default"
    """Blocks of another model are not found, whatever else is equal."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidFieldError("dtype", f"{self.dtype!r}", ", ".join(DTYPE_BYTES))
        self.layout(num_blocks=1, alignment=1)

    def layout(self, num_blocks: int, alignment: int) -> LayoutConfig:
        """So many blocks of it. Raises LayoutError."""
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
        """Stands for all of it: what was kept under another one is not these blocks."""
        return xxh3_64_intdigest(msgspec.json.encode(self))


class OnDevice(Struct, frozen=True):
    """Memory of a torch device: `cpu`, `cuda`, `cuda:1`."""

    device: str = "cpu"


class OnHost(Struct, frozen=True):
    """Memory of this process, pinned where there is a device to copy to by itself."""

    is_pinned: bool = True


class Shared(Struct, frozen=True):
    """Host memory by a name, in a directory of memory such as /dev/shm. With the journal beside it
    blocks outlive the process.
    """

    path: Path


class InFile(Struct, frozen=True):
    """A file on a disk."""

    path: Path
    zero_fill: bool = False
    """Where room cannot be reserved at once, reserve it by writing zeros."""
    is_kept: bool = True
    """With the journal beside it blocks outlive the process; else nobody finds the file."""
    is_direct: bool = True
    """Go past the page cache, where the file system can."""


class Ready(Struct, frozen=True):
    """Memory, or a file, that is there: one, or one a layer. It is given over, and closed with the
    manager.
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
    """What memory they lie in: of the device for G1, of the host for G2, in a file for G3."""
    kind: LayoutKind = LayoutKind.CONTIGUOUS
    """Only the device's may lie apart, layer by layer: elsewhere nothing is computed, and a block
    in one piece is one copy.
    """
    alignment: int = 1
    """The device's begin at multiples of so many bytes; a power of two."""
    eviction: str | None = None
    """One of `EVICTIONS`; by default `lru` on the device, `lineage` elsewhere."""
    duplicates: Duplicates = Duplicates.REJECTED

    def check(self, level: CacheLevel) -> None:
        """Raises InvalidFieldError for what this level cannot have."""
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
    """A policy by its name, for a pool of so many blocks."""
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
    max_blocks: int
    """Of all workers together; what was stored first goes first. At least 1."""
    namespace: str = "default"
    ttl_s: float = 3600.0
    """Above 0."""
    timeout_s: float = 1.0
    """Of a call; above 0."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise InvalidFieldError("G4.url", repr(self.url), "redis://, rediss:// or unix://")
        for field in ("max_blocks", "ttl_s", "timeout_s"):
            if getattr(self, field) <= 0:
                value = getattr(self, field)
                raise InvalidFieldError(f"G4.{field}", f"{value}", "above 0")


class Offload(Struct, frozen=True, kw_only=True):
    """What goes down, and how fast. Raises InvalidFieldError."""

    batch_blocks: int = 16
    """Go in one call of a tier, which nothing interrupts."""
    max_waiting_blocks: int = 65_536
    """Wait for each tier; beyond, the least urgent are not stored."""
    store_bytes_per_s: float = 2e9
    """Into each tier; a tenth of it while requests are decoded."""
    min_priority: int = 0
    """Of a prompt only the leading blocks of at least this priority leave the device."""
    host_rule: OffloadRule = "all"
    disk_rule: OffloadRule = "all"
    remote_rule: OffloadRule = "all"
    """What is worth a place in each tier."""
    drain_s: float = 10.0
    """At the end, what waits is stored for so long, where it outlives the process."""
    adopt_timeout_s: float = 600.0
    """What a former life left and is not proven by then is left where it is."""
    loads_always: bool = False
    """Load whatever is there, even if computing it anew were done sooner."""

    def __post_init__(self) -> None:
        for field in ("batch_blocks", "max_waiting_blocks", "store_bytes_per_s"):
            if getattr(self, field) <= 0:
                raise InvalidFieldError(field, f"{getattr(self, field)}", "above 0")
        for field in ("drain_s", "adopt_timeout_s"):
            if getattr(self, field) < 0:
                raise InvalidFieldError(field, f"{getattr(self, field)}", "0 or more")


class BlockManagerConfig(Struct, frozen=True, kw_only=True):
    """All of it. Raises InvalidFieldError, LayoutError, before any memory is taken."""

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
        """Those that are wanted, fastest first."""
        each = zip(CacheLevel, (self.device, self.host, self.disk), strict=False)
        return {level: tier for level, tier in each if tier is not None}
