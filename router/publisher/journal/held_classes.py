"""The blocks of one rank by class of a hybrid model, as sets beside the tiers."""

import numpy as np

from router.protocol.hybrid import HybridState, Layout
from router.protocol.values import HashArray, Tier
from router.publisher.journal.held_blocks import HeldBlocks

_NOTHING: HashArray = np.empty(0, np.uint64)


class HeldClasses:
    """The layout of a rank and the blocks of its classes.

    A table of held blocks is made with the first layout; a class stands in it in place of a tier.
    `layout`: None while the model is not known to be hybrid.
    """

    __slots__ = ("_held", "layout", "multiplier")

    def __init__(self, multiplier: int) -> None:
        self.multiplier = multiplier
        self.layout: Layout | None = None
        self._held: HeldBlocks | None = None

    @property
    def indexes(self) -> range:
        """The classes of the layout."""
        return range(0 if self.layout is None else len(self.layout.classes))

    @property
    def block_count(self) -> int:
        """The number of held blocks, each counted once per class."""
        return 0 if self._held is None else self._held.block_count

    @property
    def state(self) -> HybridState | None:
        """The layout, with the number and digest of each class's blocks."""
        if self.layout is None:
            return None
        number = len(self.layout.classes)
        if self._held is None:
            return HybridState(self.layout, (0,) * number, (0,) * number)
        held = self._held.state()
        return HybridState(self.layout, held.counts[:number], held.digests[:number])

    def store(self, index: int, names: HashArray) -> HashArray:
        """Hold blocks, none of which has a parent. Returns those that were new."""
        if self._held is None:
            self._held = HeldBlocks(self.multiplier)
        heads = np.zeros((len(names), 3), np.uint64)
        heads[:, 0] = np.arange(len(names))
        return self._held.store_paths(Tier(index), names, heads.ravel())

    def remove(self, index: int, names: HashArray) -> HashArray:
        """Remove blocks from a class. Returns those that were held."""
        return _NOTHING if self._held is None else self._held.remove(Tier(index), names)

    def clear(self) -> list[int]:
        """Remove all blocks. Returns the classes that held some."""
        if self._held is None:
            return []
        held = [index for index, count in enumerate(self._held.state().counts) if count]
        self._held.clear()
        return held

    def held(self, index: int) -> HashArray:
        """Return all blocks that a class holds, unordered."""
        return _NOTHING if self._held is None else self._held.held(Tier(index))
