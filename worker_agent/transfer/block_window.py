"""Blocks of a layout as bytes on the host, for reads and writes by a socket.

The bytes of a block that is contiguous on the host are used directly. Other blocks are copied:
gathered into a row before a read, scattered from it after a write.
"""

from collections.abc import Callable, Sequence
from threading import Lock

from torch import Tensor

from worker_agent.transfer.device_copies import DeviceCopies
from worker_agent.transfer.physical import PhysicalLayout
from worker_agent.transfer.rows import block_views


class BlockWindow:
    """Host view of a layout's blocks, for any thread.

    At most one thread at a time may write a block. Which blocks a caller may use is not checked.
    """

    __slots__ = ("_copies", "_layout", "_lock", "_views", "block_bytes", "num_blocks")

    def __init__(self, layout: PhysicalLayout) -> None:
        self.block_bytes = layout.layout.config.block_bytes
        self.num_blocks = layout.layout.config.num_blocks
        self._layout = layout
        self._views = block_views(layout) if layout.device.type == "cpu" else None
        self._copies = DeviceCopies([layout])
        self._lock = Lock()
        """Guards the copies, which use staging rows of their own."""

    def outgoing(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return the bytes of blocks, for reading."""
        if self._views is not None:
            return [_view(self._views[block]) for block in blocks]
        rows = self._copies.host_rows(len(blocks))
        with self._lock:
            self._copies.gather(blocks, rows).wait()
        return [_view(row) for row in rows]

    def addresses(self, blocks: Sequence[int]) -> list[int]:
        """Return the addresses of blocks; every block must be contiguous."""
        layout = self._layout.layout
        return [layout.memory_region(block, 0, 0).address for block in blocks]

    @property
    def address_range(self) -> tuple[int, int]:
        """The address and the size of the memory that contains the blocks."""
        region = self._layout.layout.regions[0]
        return region.address, region.size_bytes

    def offsets(self, blocks: Sequence[int]) -> list[int]:
        """Return the offsets of blocks in their memory; every block must be contiguous."""
        first, _ = self.address_range
        return [address - first for address in self.addresses(blocks)]

    @property
    def memory_bytes(self) -> int:
        """Size of the memory that contains the blocks."""
        return self.address_range[1]

    @property
    def is_in_one_piece(self) -> bool:
        """True if every block is contiguous, on the host."""
        return self._views is not None

    def incoming(self, blocks: Sequence[int]) -> "Incoming":
        """Return buffers for writing blocks."""
        if self._views is not None:
            return Incoming([_view(self._views[block]) for block in blocks])
        rows = self._copies.host_rows(len(blocks))

        def scatter(places: list[int]) -> None:
            with self._lock:
                self._copies.scatter([blocks[place] for place in places], rows[places]).wait()

        return Incoming([_view(row) for row in rows], scatter)


class Incoming:
    """Buffers for blocks. `views[i]` is the block at place i."""

    __slots__ = ("_scatter", "views")

    def __init__(
        self, views: Sequence[memoryview], scatter: Callable[[list[int]], None] | None = None
    ) -> None:
        self.views = views
        self._scatter = scatter

    def landed(self, places: list[int]) -> None:
        """Accept the blocks at these places: they were received intact."""
        if self._scatter is not None and places:
            self._scatter(places)


def _view(row: Tensor) -> memoryview:
    return row.numpy().data
