"""The last prompt that named each block of a rank: 32 to 64 bytes per block."""

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.indexer import _last_prompt_kernel
from router.protocol.values import HashArray

Serials = npt.NDArray[np.uint64]

_FEWEST_SLOTS = 64


class LastPrompt(Struct, frozen=True, eq=False):
    """The effects of naming a prompt.

    `blocks`: its blocks, each once, in an array of their own. `new_blocks`: number of blocks that
    no prompt had named before. `superseded`: {earlier prompt, blocks it was the last to name}; a
    prompt may occur several times.
    """

    blocks: HashArray
    new_blocks: int
    superseded: list[list[int]]


class LastPromptIndex:
    """Serial numbers of prompts, from 1 on, by block. `len` is the number of blocks."""

    __slots__ = ("_count", "_slots")

    def __init__(self) -> None:
        self._slots = np.zeros((_FEWEST_SLOTS, 2), np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def name(self, blocks: HashArray, serial: int) -> LastPrompt:
        """Set a new prompt as the last one that named these blocks. Amortised O(blocks)."""
        self._make_room(len(blocks))
        named, runs = np.empty(len(blocks), np.uint64), np.empty((len(blocks), 2), np.uint64)
        count, new_blocks, run_count = _last_prompt_kernel.name(
            self._slots, blocks, np.uint64(serial), named, runs
        )
        self._count += new_blocks
        return LastPrompt(named[:count], new_blocks, runs[:run_count].tolist() if run_count else [])

    def of(self, blocks: HashArray) -> Serials:
        """Return the last prompt that named each of these blocks; 0 if none did. O(blocks)."""
        serials = np.empty(len(blocks), np.uint64)
        _last_prompt_kernel.last(self._slots, blocks, serials)
        return serials

    def forget(self, blocks: HashArray) -> None:
        """Remove blocks, which must be present, each named once. O(blocks)."""
        _last_prompt_kernel.forget(self._slots, blocks)
        self._count -= len(blocks)

    def blocks(self) -> HashArray:
        """Return all blocks, unordered. O(all)."""
        blocks: HashArray = self._slots[self._slots[:, 1] != 0, 0]
        return blocks

    def serials(self) -> list[int]:
        """Return the prompts that are the last of some block, each once. O(all)."""
        serials: list[int] = np.unique(self._slots[:, 1]).tolist()
        return [serial for serial in serials if serial]

    def _make_room(self, blocks: int) -> None:
        slots = len(self._slots)
        while 2 * (self._count + blocks) > slots:
            slots *= 2
        if slots > len(self._slots):
            grown = np.zeros((slots, 2), np.uint64)
            _last_prompt_kernel.move(self._slots, grown)
            self._slots = grown
