"""The address of every byte of every block, over memory that the layout does not own.

A layout allocates nothing, is independent of the kind of storage, and never reads the memory.
"""

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import BlockIndexError, RegionError
from worker_agent.layout.strides import LayoutKind, round_up, strides


class MemoryRegion(Struct, frozen=True):
    """A piece of an address space: of this process, of a device, of a file, or of a peer."""

    address: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.address + self.size_bytes


class Layout:
    """Blocks of one configuration laid out on regions of memory; immutable.

    Invariants: no two (block, layer, outer) share a byte; every one is inside its region.
    """

    __slots__ = ("_bases", "_strides", "config", "kind", "regions")

    def __init__(
        self, config: LayoutConfig, kind: LayoutKind, regions: Sequence[MemoryRegion]
    ) -> None:
        """Lay out blocks on one region, or on one per layer.

        Raises RegionError for another number of regions, one that is too small, and overlaps.
        """
        self.config = config
        self.kind = kind
        self.regions = tuple(regions)
        self._strides = strides(config, kind)
        self._bases = [round_up(region.address, config.alignment) for region in regions]
        self._check_regions()

    @property
    def is_contiguous(self) -> bool:
        """True if a block is in one piece."""
        return self.kind is LayoutKind.CONTIGUOUS

    @property
    def block_stride_bytes(self) -> int:
        """The distance from a block to the next in the same region."""
        return self._strides.block_bytes

    def memory_region(self, block: int, layer: int, outer: int) -> MemoryRegion:
        """Return the keys or values of one layer of a block. Raises BlockIndexError."""
        config = self.config
        _check_index("block", block, config.num_blocks)
        _check_index("layer", layer, config.num_layers)
        _check_index("outer", outer, config.outer_dim)
        base = self._bases[layer if self.kind.is_layer_separate else 0]
        address = (
            base
            + block * self._strides.block_bytes
            + layer * self._strides.layer_bytes
            + outer * self._strides.outer_bytes
        )
        return MemoryRegion(address, config.region_bytes)

    def _check_regions(self) -> None:
        expected = self.config.num_layers if self.kind.is_layer_separate else 1
        if len(self.regions) != expected:
            raise RegionError(
                "regions", f"{len(self.regions)}", f"{expected}", rule="region_count_mismatch"
            )
        for index, (region, base) in enumerate(zip(self.regions, self._bases, strict=True)):
            required_bytes = base - region.address + self._strides.data_bytes
            if region.size_bytes < required_bytes:
                raise RegionError(
                    f"regions[{index}]",
                    f"{region.size_bytes} bytes",
                    f"at least {required_bytes}",
                    rule="region_too_small",
                )
        in_order = sorted(self.regions, key=lambda region: region.address)
        for first, second in pairwise(in_order):
            if first.end > second.address:
                raise RegionError(
                    "regions",
                    f"{second.address:#x} is inside the region at {first.address:#x}",
                    "regions that do not overlap",
                    rule="regions_overlap",
                )


def _check_index(field: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise BlockIndexError(field, index, count)
