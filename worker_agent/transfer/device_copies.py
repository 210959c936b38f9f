"""Copies between a layout and rows on the host, concurrent with the engine's work.

    gather    blocks ─index_select▶ staging on the device ─one copy▶ rows on the host
    scatter   blocks ◀─index_copy── staging on the device ◀─one copy─ rows on the host

One copy moves many blocks, instead of one for every layer of every block. Gathering takes a
fiftieth of the time of the PCIe copy, so overlapping the two would gain nothing. On the CPU the
same calls copy directly.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from worker_agent.storage.memory import pinned_memory
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.physical import PhysicalLayout
from worker_agent.transfer.plan import check_distinct
from worker_agent.transfer.rows import Rows
from worker_agent.transfer.slots import aligned_rows


class CopyStream:
    """One direction of copies. It waits for the engine's stream, which never waits for it."""

    __slots__ = ("_engine_stream", "_stream")

    def __init__(
        self, device: torch.device, engine_stream: "torch.cuda.Stream | None" = None
    ) -> None:
        """Create the stream. `engine_stream`: the engine's stream; None: the device's default."""
        self._stream = _stream_of(device) if device.type == "cuda" else None
        self._engine_stream = engine_stream

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run the copies of the body after the engine's queued work; they are complete at the end.

        The engine's streams are not synchronized: only an event is waited for.
        """
        if self._stream is None:
            yield
            return
        engine = self._engine_stream or torch.cuda.default_stream(self._stream.device)
        self._stream.wait_event(engine.record_event())
        with torch.cuda.stream(self._stream):
            yield
            done = self._stream.record_event()
        done.synchronize()


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


STAGING_BLOCKS = 16


class DeviceCopies:
    """Copies of one layout, one call at a time.

    `rows`: (n, block bytes) uint8 on the host, preferably from `host_rows`. The copies are complete
    when a call returns.
    """

    __slots__ = ("_layout", "_loads", "_staging", "_stores")

    def __init__(
        self, layout: PhysicalLayout, engine_stream: "torch.cuda.Stream | None" = None
    ) -> None:
        """Create the copier. `engine_stream`: the engine's stream; None: the device's default."""
        self._layout = layout
        self._loads = CopyStream(layout.device, engine_stream)
        self._stores = CopyStream(layout.device, engine_stream)
        is_host = layout.device.type == "cpu"
        self._staging = None if is_host else Rows.of(layout, STAGING_BLOCKS)

    def host_rows(self, count: int) -> Tensor:
        """Return rows that suit DMA by a device and direct reads and writes by a disk."""
        size_bytes = self._layout.layout.config.block_bytes
        if self._layout.device.type == "cpu":
            return aligned_rows(count, size_bytes)
        return pinned_memory(count * size_bytes).tensor.view(count, size_bytes)

    def gather(self, blocks: Sequence[int], rows: Tensor) -> None:
        """Copy blocks into rows. Raises TransferError for an unknown or repeated block."""
        self._check(blocks, rows)
        with self._stores.copying():
            for part, staging in self._parts(rows[: len(blocks)]):
                staging.gather(blocks[part])
                _copy(staging.tensor, rows[part])

    def scatter(self, blocks: Sequence[int], rows: Tensor) -> None:
        """Copy rows into blocks. Raises TransferError like `gather`."""
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
    """Copy as many rows as both have; do nothing if both are the same memory."""
    if source.data_ptr() != target.data_ptr():
        count = min(len(source), len(target))
        target[:count].copy_(source[:count], non_blocking=True)
