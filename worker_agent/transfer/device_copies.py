"""Blocks of a layout to and from rows on the host, beside the engine's own work.

    gather    blocks ─index_select▶ staging on the device ─one copy▶ rows on the host
    scatter   blocks ◀─index_copy── staging on the device ◀─one copy─ rows on the host

Instead of a copy for every layer of every block there is one for many blocks. (Gathering takes a
fiftieth of the time of the way over PCIe, so that nothing is won by doing both at once.) On the CPU
the same calls go straight.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from router.block_errors import TransferError
from worker_agent.storage.memory import pinned_memory
from worker_agent.transfer.lane import Lane
from worker_agent.transfer.physical import PhysicalLayout
from worker_agent.transfer.plan import check_distinct
from worker_agent.transfer.rows import Rows
from worker_agent.transfer.slots import aligned_rows

STAGING_BLOCKS = 16


class DeviceCopies:
    """Copies of one layout, one call at a time. `rows`: (n, block bytes) uint8 on the host, best
    from `host_rows`; they are done when a call returns.
    """

    __slots__ = ("_layout", "_loads", "_staging", "_stores")

    def __init__(
        self, layout: PhysicalLayout, engine_stream: "torch.cuda.Stream | None" = None
    ) -> None:
        """`engine_stream`: where the engine computes; None: the device's default stream."""
        self._layout = layout
        self._loads = Lane(layout.device, engine_stream)
        self._stores = Lane(layout.device, engine_stream)
        is_host = layout.device.type == "cpu"
        self._staging = None if is_host else Rows.of(layout, STAGING_BLOCKS)

    def host_rows(self, count: int) -> Tensor:
        """Rows that a device copies by itself, and that a disk reads and writes where they are."""
        size_bytes = self._layout.layout.config.block_bytes
        if self._layout.device.type == "cpu":
            return aligned_rows(count, size_bytes)
        return pinned_memory(count * size_bytes).tensor.view(count, size_bytes)

    def gather(self, blocks: Sequence[int], rows: Tensor) -> None:
        """Copy blocks into rows. Raises TransferError for a block that is none or there twice."""
        self._check(blocks, rows)
        with self._stores.copying():
            for part, staging in self._parts(rows[: len(blocks)]):
                staging.gather(blocks[part])
                _copy(staging.tensor, rows[part])

    def scatter(self, blocks: Sequence[int], rows: Tensor) -> None:
        """Copy rows into blocks; like `gather`."""
        self._check(blocks, rows)
        with self._loads.copying():
            for part, staging in self._parts(rows[: len(blocks)]):
                _copy(rows[part], staging.tensor)
                staging.scatter(blocks[part])

    def _parts(self, rows: Tensor) -> Iterator[tuple[slice, Rows]]:
        if self._staging is None:
            if len(rows):
                yield slice(0, len(rows)), Rows(self._layout, rows)
            return
        for start in range(0, len(rows), STAGING_BLOCKS):
            yield slice(start, min(start + STAGING_BLOCKS, len(rows))), self._staging

    def _check(self, blocks: Sequence[int], rows: Tensor) -> None:
        config = self._layout.layout.config
        check_distinct("blocks", blocks, config.num_blocks)
        if len(rows) < len(blocks) or rows.shape[1:] != (config.block_bytes,):
            allowed = f"{len(blocks)} of {config.block_bytes} bytes"
            raise TransferError("rows", f"{tuple(rows.shape)}", allowed, rule="count_mismatch")


def _copy(source: Tensor, target: Tensor) -> None:
    """As many rows as both have; nothing where both are the same."""
    if source.data_ptr() != target.data_ptr():
        count = min(len(source), len(target))
        target[:count].copy_(source[:count], non_blocking=True)
