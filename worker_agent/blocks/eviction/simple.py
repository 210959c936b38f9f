"""Eviction by release order (LRU), and by priority.

Source: the inactive pool of Dynamo's first block manager (`priority_set`).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sortedcontainers import SortedList

from worker_agent.blocks.eviction.base import Unused, check_count


class PriorityEviction:
    """Eviction by priority. O(log blocks) per block."""

    __slots__ = ("_keys", "_order")

    def __init__(self) -> None:
        self._keys: dict[int, tuple[int, int, bytes, int]] = {}
        self._order: SortedList[tuple[int, int, bytes, int]] = SortedList()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, blocks: Sequence[int], unused: Sequence[Unused]) -> None:
        """Add blocks, ordered by priority, then time, then identity."""
        for block, each in zip(blocks, unused, strict=True):
            key = (each.priority, each.returned_tick, each.name.identity, block)
            self._keys[block] = key
            self._order.add(key)

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove blocks that are in use again. Raises KeyError."""
        for block in blocks:
            self._order.remove(self._keys.pop(block))

    def pop(self, count: int) -> list[int]:
        """Remove and return the lowest blocks. Raises KeyError if there are fewer."""
        check_count(self, count)
        popped = [key[3] for key in self._order[:count]]
        del self._order[:count]
        for block in popped:
            del self._keys[block]
        return popped

    def note_uses(self, identities: Sequence[bytes]) -> None:
        """Do nothing: only releases count here."""

    def check_invariants(self) -> None:
        """Assert that both collections hold the same blocks."""
        assert sorted(self._keys.values()) == list(self._order)
        assert all(key[3] == block for block, key in self._keys.items())


class LruEviction:
    """Eviction by time of release. O(1) per block.

    Default of the device tier, where prompts are released tail first.
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Sequence[int], unused: Sequence[Unused]) -> None:
        """Add blocks at the end."""
        del unused
        self._blocks.update(dict.fromkeys(blocks))

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove blocks that are in use again. Raises KeyError."""
        for block in blocks:
            del self._blocks[block]

    def pop(self, count: int) -> list[int]:
        """Remove and return the first blocks. Raises KeyError if there are fewer."""
        check_count(self, count)
        popitem = self._blocks.popitem
        return [popitem(last=False)[0] for _ in range(count)]

    def note_uses(self, identities: Sequence[bytes]) -> None:
        """Do nothing: only releases count here."""

    def check_invariants(self) -> None:
        """Assert nothing: there is no invariant."""
