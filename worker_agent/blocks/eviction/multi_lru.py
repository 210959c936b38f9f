"""Eviction of rarely requested blocks, however recent; of equals, the one released first.

There are four levels by the number of requests for a block; its level is set when it is released.
Source: `MultiLru` of Dynamo's second block manager.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

from router.errors import InvalidFieldError
from worker_agent.blocks.eviction.base import Unused, check_count
from worker_agent.blocks.eviction.tiny_lfu import MAX_COUNT, TinyLfu

DEFAULT_THRESHOLDS = (3, 8, 15)


class MultiLruEviction:
    """Eviction by frequency level, then time of release. O(1) per block."""

    __slots__ = ("_frequency", "_level_of", "_level_of_count", "_levels")

    def __init__(
        self, capacity: int, thresholds: tuple[int, int, int] = DEFAULT_THRESHOLDS
    ) -> None:
        """Initialise for a pool of `capacity` blocks.

        `thresholds`: the numbers of requests from which a block is on levels 1 to 3. Raises
        InvalidFieldError.
        """
        rising = (0, *thresholds, MAX_COUNT + 1)
        if any(low >= high for low, high in pairwise(rising)):
            allowed = f"three rising counts, 1 to {MAX_COUNT}"
            raise InvalidFieldError("thresholds", str(list(thresholds)), allowed)
        self._level_of_count = [bisect_right(thresholds, count) for count in range(MAX_COUNT + 1)]
        self._frequency = TinyLfu(capacity)
        self._levels: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(4)]
        self._level_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def add(self, blocks: Sequence[int], unused: Sequence[Unused]) -> None:
        """Add blocks at the end of their levels."""
        counts = self._frequency.counts([each.name.identity for each in unused])
        levels = list(map(self._level_of_count.__getitem__, counts))
        for level in set(levels):
            of_level = (block for block, each in zip(blocks, levels, strict=True) if each == level)
            self._levels[level].update(dict.fromkeys(of_level))
        self._level_of.update(zip(blocks, levels, strict=True))

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove blocks that are in use again. Raises KeyError."""
        for block in blocks:
            del self._levels[self._level_of.pop(block)][block]

    def pop(self, count: int) -> list[int]:
        """Remove and return the first blocks of the coldest level. Raises KeyError if too few."""
        check_count(self, count)
        popped: list[int] = []
        for level in self._levels:
            oldest = list(islice(level, count - len(popped)))
            for block in oldest:
                del level[block]
            popped += oldest
        for block in popped:
            del self._level_of[block]
        return popped

    def note_uses(self, identities: Sequence[bytes]) -> None:
        """Count requests; they take effect when a block is released next."""
        self._frequency.note(identities)

    def check_invariants(self) -> None:
        """Assert that both collections hold the same blocks."""
        for number, level in enumerate(self._levels):
            assert all(self._level_of[block] == number for block in level)
        assert sum(map(len, self._levels)) == len(self._level_of)
