"""Copies between blocks and rows on the host, concurrent with the engine's work.

    gather    blocks ─index_select▶ staging on the device ─one copy▶ rows on the host
    scatter   blocks ◀─index_copy── staging on the device ◀─one copy─ rows on the host

One copy moves many blocks, instead of one for every layer of every block. Gathering takes a
fiftieth of the time of the PCIe copy, so overlapping the two would gain nothing. On the CPU the
same calls copy directly. A row is a block: its part in the first layout, then in the second, and so
on.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from worker_agent.transfer.copy_stream import CopyDevice, CopyStream, DeviceCopy, copy_device
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.physical import PhysicalLayout
from worker_agent.transfer.plan import check_distinct
from worker_agent.transfer.rows import Rows

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


class DeviceCopies:
    """Copies of blocks whose parts lie in one or more layouts on one device.

    `rows`: (n, block bytes) uint8 on the host, from `host_rows`. One thread at a time may call.
    """

    __slots__ = ("_device", "_loads", "_num_blocks", "_stores", "block_bytes")

    def __init__(self, layouts: Sequence[PhysicalLayout], device: CopyDevice | None = None) -> None:
        """Create the copier. `device`: None derives it from the layouts' memory."""
        self._device = copy_device(layouts[0].device) if device is None else device
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
                for each in columns:
                    each.gather(blocks[part])
                _copy(memory, rows[part])
        return self._stores.stream.copy_of(rows)

    def scatter(self, blocks: Sequence[int], rows: Tensor) -> DeviceCopy:
        """Begin to copy rows into blocks. Raises TransferError like `gather`."""
        self._check(blocks, rows)
        with self._loads.stream.after_queued_work():
            for part, columns, memory in self._loads.parts(rows[: len(blocks)]):
                _copy(rows[part], memory)
                for each in columns:
                    each.scatter(blocks[part])
        return self._loads.stream.copy_of(rows)

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


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy rows; do nothing if both are the same memory."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source, non_blocking=True)
