"""Copies between blocks and rows on the host, concurrent with the engine's work.

    gather    blocks ─index_select▶ staging on the device ─one copy▶ rows on the host
    scatter   blocks ◀─index_copy── staging on the device ◀─one copy─ rows on the host

One copy moves many blocks, instead of one for every layer of every block. Gathering takes a
fiftieth of the time of the PCIe copy, so overlapping the two would gain nothing. On the CPU the
same calls copy directly. A row is a block: its part in the first layout, then in the second, and so
on.

Layer by layer, while the engine computes: a layer is gathered once it is computed, and awaited
before it is computed. Between staging and host all layers are one copy, because a layer's part of
the rows is not contiguous.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from worker_agent.transfer.copy_stream import CopyDevice, CopyStream, DeviceCopy, copy_device
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.physical import PhysicalLayout
from worker_agent.transfer.plan import check_distinct
from worker_agent.transfer.rows import Rows, index_of

STAGING_BLOCKS = 16


class _Direction:
    """A stream, and the staging rows that only its copies use."""

    __slots__ = ("_layouts", "_rows", "_staging", "stream")

    def __init__(
        self, layouts: Sequence[PhysicalLayout], device: CopyDevice, block_bytes: int
    ) -> None:
        self.stream = CopyStream(device)
        self._layouts = layouts
        self._staging = device.staging(STAGING_BLOCKS, block_bytes)
        self._rows = [] if self._staging is None else _split(layouts, self._staging)

    def parts(self, rows: Tensor) -> Iterator[tuple[slice, list[Rows], Tensor]]:
        """Yield slices of `rows`, with the rows to gather into and the memory of these."""
        if self._staging is None:
            if len(rows):
                yield slice(0, len(rows)), _split(self._layouts, rows), rows
            return
        for start in range(0, len(rows), STAGING_BLOCKS):
            part = slice(start, min(start + STAGING_BLOCKS, len(rows)))
            yield part, self._rows, self._staging[: part.stop - part.start]


class LayerGather:
    """A gather in progress of blocks that the engine fills meanwhile, layer by layer."""

    __slots__ = ("_index", "_layers", "_memory", "_rows", "_saved", "_stream")

    def __init__(
        self,
        stream: CopyStream,
        index: Tensor,
        layers: Sequence[tuple[Rows, int]],
        copied: tuple[Tensor, Tensor],
    ) -> None:
        """Set it up. `layers`: where each is gathered; `copied`: that memory, and the rows.

        `index`: of the blocks, made in `stream`.
        """
        self._stream = stream
        self._index = index
        self._layers = layers
        self._memory, self._rows = copied
        self._saved: set[int] = set()

    def save(self, layer: int) -> None:
        """Gather a layer after all that the calling thread has queued; may be repeated."""
        self._saved.add(layer)
        columns, place = self._layers[layer]
        with self._stream.after_queued_work():
            columns.gather(self._index, place)

    def end(self) -> DeviceCopy:
        """Gather the layers that were not saved, and return the copy of all."""
        for layer in set(range(len(self._layers))) - self._saved:
            self.save(layer)
        with self._stream.after_queued_work():
            _copy(self._memory, self._rows)
        return self._stream.copy_of(self._rows)


class LayerScatter:
    """A scatter in progress. The engine awaits each layer before it computes it."""

    __slots__ = ("_layers",)

    def __init__(self, layers: Sequence[DeviceCopy]) -> None:
        self._layers = layers

    def hold_back(self, layer: int = -1) -> None:
        """Let the work that the calling thread queues from now on begin after this layer's copy.

        By default after the last one, which completes after all others.
        """
        self._layers[layer].hold_back()


class DeviceCopies:
    """Copies of blocks whose parts lie in one or more layouts on one device.

    `rows`: (n, block bytes) uint8 on the host, from `host_rows`. One thread at a time may call.
    """

    __slots__ = (
        "_device",
        "_layer_staging",
        "_layouts",
        "_loads",
        "_num_blocks",
        "_stores",
        "block_bytes",
    )

    def __init__(self, layouts: Sequence[PhysicalLayout], device: CopyDevice | None = None) -> None:
        """Create the copier. `device`: None derives it from the layouts' memory."""
        self._device = copy_device(layouts[0].device) if device is None else device
        self._layouts = layouts
        self._layer_staging: Tensor | None = None
        """Rows of `gather_by_layer`, between the layers of which others are gathered."""
        self._num_blocks = layouts[0].layout.config.num_blocks
        self.block_bytes = sum(each.layout.config.block_bytes for each in layouts)
        self._loads = _Direction(layouts, self._device, self.block_bytes)
        self._stores = _Direction(layouts, self._device, self.block_bytes)

    def host_rows(self, count: int) -> Tensor:
        """Return rows that suit DMA by a device, or direct reads and writes by a disk."""
        return self._device.host_rows(count, self.block_bytes)

    def gather(self, blocks: Sequence[int], rows: Tensor) -> DeviceCopy:
        """Begin to copy blocks into rows. Raises TransferError for an unknown or repeated block."""
        self._check(blocks, rows)
        with self._stores.stream.after_queued_work():
            for part, columns, memory in self._stores.parts(rows[: len(blocks)]):
                index = self._index_of(blocks[part])
                for each in columns:
                    each.gather(index)
                _copy(memory, rows[part])
        return self._stores.stream.copy_of(rows)

    def scatter(self, blocks: Sequence[int], rows: Tensor) -> DeviceCopy:
        """Begin to copy rows into blocks. Raises TransferError like `gather`."""
        self._check(blocks, rows)
        with self._loads.stream.after_queued_work():
            for part, columns, memory in self._loads.parts(rows[: len(blocks)]):
                _copy(rows[part], memory)
                index = self._index_of(blocks[part])
                for each in columns:
                    each.scatter(index)
        return self._loads.stream.copy_of(rows)

    def gather_by_layer(self, blocks: Sequence[int]) -> LayerGather:
        """Begin to copy blocks, at most `STAGING_BLOCKS`, as their layers are saved.

        One at a time. Raises TransferError like `gather`.
        """
        rows = self.host_rows(len(blocks))
        self._check(blocks, rows)
        if self._layer_staging is None:
            self._layer_staging = self._device.staging(STAGING_BLOCKS, self.block_bytes)
        memory = rows if self._layer_staging is None else self._layer_staging[: len(blocks)]
        columns = _by_layer(self._layouts, _split(self._layouts, memory))
        stream = self._stores.stream
        with stream.after_queued_work():
            index = self._index_of(blocks)
        return LayerGather(stream, index, columns, (memory, rows))

    def scatter_by_layer(self, blocks: Sequence[int], rows: Tensor) -> LayerScatter:
        """Begin to copy rows into blocks, of the last ones layer by layer.

        Raises TransferError like `gather`.
        """
        self._check(blocks, rows)
        layers: list[DeviceCopy] = []
        stream = self._loads.stream
        with stream.after_queued_work():
            for part, columns, memory in self._loads.parts(rows[: len(blocks)]):
                _copy(rows[part], memory)
                layers, index = [], self._index_of(blocks[part])
                for each, layer in _by_layer(self._layouts, columns):
                    each.scatter(index, layer)
                    layers.append(stream.copy_of(rows))
        return LayerScatter(layers)

    def _index_of(self, blocks: Sequence[int]) -> Tensor:
        return index_of(blocks, self._layouts[0].device)

    def _check(self, blocks: Sequence[int], rows: Tensor) -> None:
        check_distinct("blocks", blocks, self._num_blocks)
        if len(rows) < len(blocks) or rows.shape[1:] != (self.block_bytes,):
            allowed = f"{len(blocks)} of {self.block_bytes} bytes"
            raise TransferError("rows", f"{tuple(rows.shape)}", allowed, rule="count_mismatch")


def _split(layouts: Sequence[PhysicalLayout], rows: Tensor) -> list[Rows]:
    """Return the columns of rows that belong to each layout."""
    sizes = [each.layout.config.block_bytes for each in layouts]
    return [
        Rows(each, part) for each, part in zip(layouts, torch.split(rows, sizes, 1), strict=True)
    ]


def _by_layer(layouts: Sequence[PhysicalLayout], columns: Sequence[Rows]) -> list[tuple[Rows, int]]:
    """Return the columns of each layer of all layouts, with its number in its layout."""
    return [
        (each, layer)
        for each, layout in zip(columns, layouts, strict=True)
        for layer in range(layout.layout.config.num_layers)
    ]


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy rows; do nothing if both are the same memory."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source, non_blocking=True)
