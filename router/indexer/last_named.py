"""Which prompt was the last one to name each block of a rank: 32 to 64 bytes a block."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.indexer import _named_kernel
from router.protocol.values import HashArray

Serials = npt.NDArray[np.uint64]

_FEWEST_SLOTS = 64


class Named(Struct, frozen=True, eq=False):
    """What a prompt has named: its blocks, each once, in an array of their own; how many nobody had
    named before; and of how many each earlier prompt was the last, a prompt perhaps in several
    parts.
    """

    blocks: HashArray
    new_blocks: int
    superseded: list[list[int]]


class LastNamed:
    """Serial numbers of prompts, from 1 on, by block. `len` is how many blocks there are."""

    __slots__ = ("_count", "_slots")

    def __init__(self) -> None:
        self._slots = np.zeros((_FEWEST_SLOTS, 2), np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def name(self, blocks: HashArray, serial: int) -> Named:
        """A new prompt names these blocks. Amortised O(blocks)."""
        self._make_room(len(blocks))
        named, runs = np.empty(len(blocks), np.uint64), np.empty((len(blocks), 2), np.uint64)
        count, new_blocks, run_count = _named_kernel.name(
            self._slots, blocks, np.uint64(serial), named, runs
        )
        self._count += new_blocks
        return Named(named[:count], new_blocks, runs[:run_count].tolist() if run_count else [])

    def of(self, blocks: HashArray) -> Serials:
        """The last prompt that named each of these blocks; 0: none did. O(blocks)."""
        serials = np.empty(len(blocks), np.uint64)
        _named_kernel.last(self._slots, blocks, serials)
        return serials

    def forget(self, blocks: HashArray) -> None:
        """Take out blocks that are there, each once. O(blocks)."""
        _named_kernel.forget(self._slots, blocks)
        self._count -= len(blocks)

    def blocks(self) -> HashArray:
        """All of them, in no order. O(all)."""
        blocks: HashArray = self._slots[self._slots[:, 1] != 0, 0]
        return blocks

    def serials(self) -> list[int]:
        """Prompts that were the last to name a block, each once. O(all)."""
        serials: list[int] = np.unique(self._slots[:, 1]).tolist()
        return [serial for serial in serials if serial]

    def _make_room(self, blocks: int) -> None:
        slots = len(self._slots)
        while 2 * (self._count + blocks) > slots:
            slots *= 2
        if slots > len(self._slots):
            grown = np.zeros((slots, 2), np.uint64)
            _named_kernel.move(self._slots, grown)
            self._slots = grown
