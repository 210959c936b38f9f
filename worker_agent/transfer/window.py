"""Blocks of a layout as bytes on the host, to be read by a socket, or written by one.

Where a block lies in one piece on the host its bytes are that piece; elsewhere they are a row that
is gathered before, or scattered afterwards.
"""

from collections.abc import Callable, Sequence
from threading import Lock

from torch import Tensor

from worker_agent.transfer.device_copies import DeviceCopies
from worker_agent.transfer.physical import PhysicalLayout
from worker_agent.transfer.rows import block_views


class Window:
    """Any thread; of a block one at a time may write it, and whose it is, is somebody else's
    business.
    """

    __slots__ = ("_copies", "_layout", "_lock", "_views", "block_bytes", "num_blocks")

    def __init__(self, layout: PhysicalLayout) -> None:
        self.block_bytes = layout.layout.config.block_bytes
        self.num_blocks = layout.layout.config.num_blocks
        self._layout = layout
        self._views = block_views(layout) if layout.device.type == "cpu" else None
        self._copies = DeviceCopies(layout)
        self._lock = Lock()
        """Of the copies, which go through rows of their own."""

    def outgoing(self, blocks: Sequence[int]) -> list[memoryview]:
        """Bytes to be read."""
        if self._views is not None:
            return [_view(self._views[block]) for block in blocks]
        rows = self._copies.host_rows(len(blocks))
        with self._lock:
            self._copies.gather(blocks, rows)
        return [_view(row) for row in rows]

    def offsets(self, blocks: Sequence[int]) -> list[int]:
        """Where blocks begin in the memory they lie in, in one piece each."""
        layout = self._layout.layout
        first = layout.regions[0].address
        return [layout.memory_region(block, 0, 0).address - first for block in blocks]

    @property
    def memory_bytes(self) -> int:
        """Size of that memory."""
        return self._layout.layout.regions[0].size_bytes

    @property
    def is_in_one_piece(self) -> bool:
        """Whether every block is, on the host."""
        return self._views is not None

    def incoming(self, blocks: Sequence[int]) -> "Incoming":
        """Room to be written."""
        if self._views is not None:
            return Incoming([_view(self._views[block]) for block in blocks])
        rows = self._copies.host_rows(len(blocks))

        def scatter(places: list[int]) -> None:
            with self._lock:
                self._copies.scatter([blocks[place] for place in places], rows[places])

        return Incoming([_view(row) for row in rows], scatter)


class Incoming:
    """Room for blocks. `views[i]` is the block at place i."""

    __slots__ = ("_scatter", "views")

    def __init__(
        self, views: Sequence[memoryview], scatter: Callable[[list[int]], None] | None = None
    ) -> None:
        self.views = views
        self._scatter = scatter

    def landed(self, places: list[int]) -> None:
        """These have come, and are right."""
        if self._scatter is not None and places:
            self._scatter(places)


def _view(row: Tensor) -> memoryview:
    return row.numpy().data
