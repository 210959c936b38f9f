"""Copies between blocks of any layout and rows of bytes: gather, scatter and checksum.

A row is a block as it lies in contiguous memory: [layer, outer, page]. Copies between two layouts,
two tiers, or memory and a file all use rows: one gather, one copy, one scatter, instead of a copy
for each layer and outer dimension of each block. The same functions run on CUDA and on the CPU.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from worker_agent.layout.strides import LayoutKind
from worker_agent.transfer.physical import PhysicalLayout


def checksum(row: Tensor) -> int:
    """Return the checksum of one block, (block bytes,) uint8 on the host, with the GIL released."""
    return xxh3_64_intdigest(row.numpy().data)


_LANES = {8: torch.int64, 4: torch.int32, 2: torch.int16}
"""Element types by width in bytes; indexing by bytes takes three to six times as long as by 8."""


class Rows:
    """Rows for up to `num_rows` blocks of a layout, with gather and scatter.

    `tensor`: (rows, block bytes) uint8 on the layout's device, contiguous or columns of wider rows.
    """

    __slots__ = ("_layout", "_pieces", "tensor")

    def __init__(self, layout: PhysicalLayout, tensor: Tensor) -> None:
        self._layout = layout
        self.tensor = tensor
        self._pieces = list(_pieces(layout, tensor))

    @classmethod
    def of(cls, layout: PhysicalLayout, num_rows: int) -> "Rows":
        """Allocate rows on the layout's device."""
        shape = num_rows, layout.layout.config.block_bytes
        return cls(layout, torch.empty(shape, dtype=torch.uint8, device=layout.device))

    def gather(self, blocks: Sequence[int] | Tensor, layer: int | None = None) -> None:
        """Copy blocks, or one layer of them, into the first rows. O(bytes).

        `blocks`: their numbers, or an `index_of` them that is used several times.
        """
        index = blocks if isinstance(blocks, Tensor) else index_of(blocks, self._layout.device)
        for piece, columns in self._of(layer):
            torch.index_select(piece, 0, index, out=columns[: len(blocks)])

    def scatter(self, blocks: Sequence[int] | Tensor, layer: int | None = None) -> None:
        """Copy the first rows, or one layer of them, into distinct blocks. O(bytes).

        `blocks`: as for `gather`.
        """
        index = blocks if isinstance(blocks, Tensor) else index_of(blocks, self._layout.device)
        for piece, columns in self._of(layer):
            piece.index_copy_(0, index, columns[: len(blocks)])

    def _of(self, layer: int | None) -> "list[tuple[Tensor, Tensor]]":
        if layer is None:
            return self._pieces
        count = len(self._pieces) // self._layout.layout.config.num_layers
        return self._pieces[layer * count : (layer + 1) * count]


def index_of(blocks: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers of blocks on their device, in the current stream's order.

    The host's copy is pinned: a copy of pageable memory would wait for the stream.
    """
    index = torch.tensor(blocks, dtype=torch.int64, pin_memory=device.type == "cuda")
    return index.to(device, non_blocking=True)


def block_views(layout: PhysicalLayout) -> Tensor | None:
    """Return a view of (blocks, block bytes) uint8. Returns None if blocks are not contiguous."""
    if not layout.layout.is_contiguous:
        return None
    [region] = layout.regions
    first = layout.layout.memory_region(0, 0, 0).address - region.data_ptr()
    config = layout.layout.config
    strides = layout.layout.block_stride_bytes, 1
    return region[first:].as_strided((config.num_blocks, config.block_bytes), strides)


def _pieces(layout: PhysicalLayout, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each piece that blocks consist of, with the columns of rows that hold it.

    Both are views in the widest possible lanes: (blocks, lanes of a piece) and (rows, the same).
    """
    config, kind = layout.layout.config, layout.layout.kind
    size_bytes = _piece_bytes(layout)
    stride_bytes = layout.layout.block_stride_bytes
    for number, start in enumerate(range(0, config.block_bytes, size_bytes)):
        layer, rest_bytes = divmod(start, config.outer_dim * config.region_bytes)
        place = layout.layout.memory_region(0, layer, rest_bytes // config.region_bytes)
        region = layout.regions[layer if kind.is_layer_separate else 0]
        offset = place.address - region.data_ptr()
        of_rows = rows.stride(0), int(rows.storage_offset())
        lane = _lane_bytes(offset, stride_bytes, size_bytes, place.address, *of_rows)
        piece = _in_lanes(region[offset:], lane).as_strided(
            (config.num_blocks, size_bytes // lane), (stride_bytes // lane, 1)
        )
        yield (
            piece,
            _in_lanes(rows, lane)[:, number * size_bytes // lane :][:, : size_bytes // lane],
        )


def _piece_bytes(layout: PhysicalLayout) -> int:
    """Return the number of bytes of a block that are contiguous."""
    config = layout.layout.config
    match layout.layout.kind:
        case LayoutKind.CONTIGUOUS:
            return config.block_bytes
        case LayoutKind.BLOCK_FIRST:
            return config.outer_dim * config.region_bytes
        case LayoutKind.BLOCK_SECOND:
            return config.region_bytes


def _lane_bytes(*sizes_bytes: int) -> int:
    """Return the widest lane that divides all of these sizes."""
    return next((lane for lane in _LANES if not any(size % lane for size in sizes_bytes)), 1)


def _in_lanes(tensor: Tensor, lane: int) -> Tensor:
    """Return a view in lanes, without the rest that fills none."""
    if lane == 1:
        return tensor
    return tensor[..., : tensor.shape[-1] // lane * lane].view(_LANES[lane])
