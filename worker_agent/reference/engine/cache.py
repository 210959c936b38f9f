"""Keys and values of a rank's blocks, in any layout: as the model's tensors, and as byte rows.

    contiguous     one tensor      (blocks, layers, 2, page)       page: nhd  (tokens, heads, size)
    block_first    one per layer   (blocks, 2, page)                     hnd  (heads, tokens, size)
    block_second   one per layer   (2, blocks, page)

Rows of bytes are the form in which other tiers store blocks.
"""

import math
from collections.abc import Sequence
from typing import Self

import torch
from msgspec import Struct
from torch import Tensor

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.orders import (
    OPERATIONAL_HND,
    OPERATIONAL_NHD,
    BlockOrder,
    InnerShape,
    reordered,
)
from worker_agent.layout.strides import LayoutKind
from worker_agent.transfer.physical import PhysicalLayout
from worker_agent.transfer.rows import Rows

DTYPE = torch.float32


class CacheShape(Struct, frozen=True):
    """The dimensions of a rank's cache."""

    num_blocks: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    def layout(self) -> LayoutConfig:
        """Return its layout for transfers. Raises LayoutError for an unsupported block size."""
        return LayoutConfig(
            num_blocks=self.num_blocks,
            num_layers=self.num_layers,
            outer_dim=2,
            page_size=self.block_size,
            inner_dim=self.num_kv_heads * self.head_dim,
            dtype_width_bytes=DTYPE.itemsize,
            num_heads=self.num_kv_heads,
        )


class CacheLayout(Struct, frozen=True):
    """The layout on the device, and the order of bytes in the rows that other tiers keep."""

    kind: LayoutKind = LayoutKind.CONTIGUOUS
    page: InnerShape = InnerShape.NHD
    kept: BlockOrder = OPERATIONAL_NHD

    @classmethod
    def kept_as_computed(cls, kind: LayoutKind, page: InnerShape) -> Self:
        """Return a layout of which rows have the order of the device: no block is converted."""
        return cls(kind, page, _order(page))


class PagedCache:
    """Blocks in memory.

    `layers`: one tensor per layer, (blocks, 2, block_size, kv_heads, head_dim), strided as the
    memory is laid out.
    """

    __slots__ = ("layers",)

    def __init__(self, shape: CacheShape, layout: CacheLayout, regions: Sequence[Tensor]) -> None:
        """Map the cache; `regions`: (bytes,) uint8 each, at least as large as the layout."""
        sizes = _region_sizes(shape, layout)
        numbers = [
            region[: math.prod(size) * DTYPE.itemsize].view(DTYPE).view(size)
            for region, size in zip(regions, sizes, strict=True)
        ]
        self.layers = _layers(numbers, shape, layout)

    @classmethod
    def allocated(cls, shape: CacheShape, layout: CacheLayout, device: torch.device) -> Self:
        """Return a cache in newly allocated, zeroed memory."""
        sizes = [math.prod(size) * DTYPE.itemsize for size in _region_sizes(shape, layout)]
        return cls(
            shape, layout, [torch.zeros(each, dtype=torch.uint8, device=device) for each in sizes]
        )


class CacheRows:
    """Blocks of a cache as rows of bytes, in the order that other tiers keep."""

    __slots__ = ("_config", "_kept", "_order", "_physical")

    def __init__(self, physical: PhysicalLayout, layout: CacheLayout) -> None:
        self._physical = physical
        self._config = physical.layout.config
        self._order = _order(layout.page)
        self._kept = layout.kept

    def gathered(self, blocks: Sequence[int]) -> Tensor:
        """Return blocks as rows, (n, block bytes) uint8, on the device. O(bytes)."""
        size = (len(blocks), self._config.block_bytes)
        rows = torch.empty(size, dtype=torch.uint8, device=self._physical.device)
        Rows(self._physical, rows).gather(blocks)
        return self._turned(rows, self._order, self._kept)

    def scatter(self, rows: Tensor, blocks: Sequence[int]) -> None:
        """Copy rows into distinct blocks. O(bytes).

        `rows`: as returned by `gathered`, on any device.
        """
        here = rows.to(self._physical.device, non_blocking=True)
        turned = self._turned(here, self._kept, self._order)
        Rows(self._physical, turned).scatter(blocks)

    def _turned(self, rows: Tensor, source: BlockOrder, target: BlockOrder) -> Tensor:
        numbers = reordered(rows.view(DTYPE), source, target, self._config)
        return numbers.view(torch.uint8)


def _order(page: InnerShape) -> BlockOrder:
    return OPERATIONAL_NHD if page is InnerShape.NHD else OPERATIONAL_HND


def _region_sizes(shape: CacheShape, layout: CacheLayout) -> list[tuple[int, ...]]:
    page = (shape.block_size, shape.num_kv_heads, shape.head_dim)
    if layout.page is InnerShape.HND:
        page = (shape.num_kv_heads, shape.block_size, shape.head_dim)
    match layout.kind:
        case LayoutKind.CONTIGUOUS:
            return [(shape.num_blocks, shape.num_layers, 2, *page)]
        case LayoutKind.BLOCK_FIRST:
            return [(shape.num_blocks, 2, *page)] * shape.num_layers
        case LayoutKind.BLOCK_SECOND:
            return [(2, shape.num_blocks, *page)] * shape.num_layers


def _layers(regions: Sequence[Tensor], shape: CacheShape, layout: CacheLayout) -> list[Tensor]:
    """Return views of the layers, with dimensions in the order of the model."""
    match layout.kind:
        case LayoutKind.CONTIGUOUS:
            layers = [regions[0][:, layer] for layer in range(shape.num_layers)]
        case LayoutKind.BLOCK_FIRST:
            layers = list(regions)
        case LayoutKind.BLOCK_SECOND:
            layers = [region.transpose(0, 1) for region in regions]
    if layout.page is InnerShape.HND:
        return [layer.transpose(2, 3) for layer in layers]
    return layers
