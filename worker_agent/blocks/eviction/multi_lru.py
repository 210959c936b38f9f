"""Blocks seldom asked for go first, however recently; of equals, the one returned first.

Four levels by how often somebody asked; a block finds its level when it is returned. Source:
`MultiLru` of Dynamo's second block manager.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from router.errors import InvalidFieldError
from worker_agent.blocks.eviction.base import Unused, check_count
from worker_agent.blocks.eviction.tiny_lfu import MAX_COUNT, TinyLfu

DEFAULT_THRESHOLDS = (3, 8, 15)


class MultiLruEviction:
    """O(1) a block."""

    __slots__ = ("_frequency", "_level_of", "_levels", "_thresholds")

    def __init__(
        self, capacity: int, thresholds: tuple[int, int, int] = DEFAULT_THRESHOLDS
    ) -> None:
        """`thresholds`: asks from which a block is on levels 1 to 3. Raises InvalidFieldError."""
        rising = (0, *thresholds, MAX_COUNT + 1)
        if any(low >= high for low, high in pairwise(rising)):
            allowed = f"three rising counts, 1 to {MAX_COUNT}"
            raise InvalidFieldError("thresholds", str(list(thresholds)), allowed)
        self._thresholds = thresholds
        self._frequency = TinyLfu(capacity)
        self._levels: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(4)]
        self._level_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def add(self, blocks: Sequence[int], unused: Sequence[Unused]) -> None:
        """Last of their levels."""
        for block, each in zip(blocks, unused, strict=True):
            level = bisect_right(self._thresholds, self._frequency.count(each.name.identity))
            self._levels[level][block] = None
            self._level_of[block] = level

    def remove(self, blocks: Iterable[int]) -> None:
        """In use again. Raises KeyError."""
        for block in blocks:
            del self._levels[self._level_of.pop(block)][block]

    def pop(self, count: int) -> list[int]:
        """The first of the coldest level. Raises KeyError when there are fewer."""
        check_count(self, count)
        popped: list[int] = []
        for level in self._levels:
            while level and len(popped) < count:
                popped.append(level.popitem(last=False)[0])
        for block in popped:
            del self._level_of[block]
        return popped

    def note_uses(self, identities: Iterable[bytes]) -> None:
        """It counts when the block is returned next."""
        for identity in identities:
            self._frequency.note(identity)

    def check_invariants(self) -> None:
        """Assert that both views hold the same."""
        for number, level in enumerate(self._levels):
            assert all(self._level_of[block] == number for block in level)
        assert sum(map(len, self._levels)) == len(self._level_of)
