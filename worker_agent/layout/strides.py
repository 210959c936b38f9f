"""Strides: the distances from one block, layer or outer dimension to the next.

| kind         | order in memory                   | regions of memory |
|--------------|-----------------------------------|-------------------|
| contiguous   | [block, layer, outer, page]       | 1                 |
| block_first  | [block, outer, page] of a layer   | one per layer     |
| block_second | [outer, block, page] of a layer   | one per layer     |

With an alignment of 1 these are the strides of Dynamo's second generation; with another, those of
its first, which pads blocks (contiguous, block_first) or a block's part (block_second).
"""

from enum import StrEnum

from msgspec import Struct

from worker_agent.layout.config import LayoutConfig


class LayoutKind(StrEnum):
    """A layout's first dimension."""

    CONTIGUOUS = "contiguous"
    BLOCK_FIRST = "block_first"
    BLOCK_SECOND = "block_second"

    @property
    def is_layer_separate(self) -> bool:
        """True if every layer has a region of memory of its own."""
        return self is not LayoutKind.CONTIGUOUS


class Strides(Struct, frozen=True):
    """Distances within a region of memory. `layer_bytes` is 0 if each layer has its own."""

    block_bytes: int
    layer_bytes: int
    outer_bytes: int
    data_bytes: int
    """From a region's first byte to the last one in use."""


def strides(config: LayoutConfig, kind: LayoutKind) -> Strides:
    """Return the distances of a layout."""
    region, outer = config.region_bytes, config.outer_dim
    match kind:
        case LayoutKind.CONTIGUOUS:
            block = round_up(config.block_bytes, config.alignment)
            data = (config.num_blocks - 1) * block + config.block_bytes
            return Strides(block, region * outer, region, data)
        case LayoutKind.BLOCK_FIRST:
            block = round_up(region * outer, config.alignment)
            return Strides(block, 0, region, config.num_blocks * block)
        case LayoutKind.BLOCK_SECOND:
            block = round_up(region, config.alignment)
            part = config.num_blocks * block
            return Strides(block, 0, part, outer * part)


def required_allocations(config: LayoutConfig, kind: LayoutKind) -> list[int]:
    """Return the bytes of each region that a layout needs, whatever address it gets."""
    regions = config.num_layers if kind.is_layer_separate else 1
    return [strides(config, kind).data_bytes + config.alignment - 1] * regions


def round_up(size_bytes: int, alignment: int) -> int:
    """Return the next multiple of a power of two."""
    return (size_bytes + alignment - 1) & -alignment
