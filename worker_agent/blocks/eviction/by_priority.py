"""The block of the lowest priority goes first; of equals, the one returned first.

Source: the inactive pool of Dynamo's first block manager (`priority_set`).
"""

from collections.abc import Iterable, Sequence

from sortedcontainers import SortedList

from worker_agent.blocks.eviction.base import Unused, check_count


class PriorityEviction:
    """O(log blocks) a block."""

    __slots__ = ("_keys", "_order")

    def __init__(self) -> None:
        self._keys: dict[int, tuple[int, int, bytes, int]] = {}
        self._order: SortedList[tuple[int, int, bytes, int]] = SortedList()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, blocks: Sequence[int], unused: Sequence[Unused]) -> None:
        """By priority, then time, then what they hold."""
        for block, each in zip(blocks, unused, strict=True):
            key = (each.priority, each.returned_tick, each.name.identity, block)
            self._keys[block] = key
            self._order.add(key)

    def remove(self, blocks: Iterable[int]) -> None:
        """In use again. Raises KeyError."""
        for block in blocks:
            self._order.remove(self._keys.pop(block))

    def pop(self, count: int) -> list[int]:
        """The lowest. Raises KeyError when there are fewer."""
        check_count(self, count)
        popped = [key[3] for key in self._order[:count]]
        del self._order[:count]
        for block in popped:
            del self._keys[block]
        return popped

    def note_uses(self, identities: Sequence[bytes]) -> None:
        """Only returning counts here."""

    def check_invariants(self) -> None:
        """Assert that both views hold the same."""
        assert sorted(self._keys.values()) == list(self._order)
        assert all(key[3] == block for block, key in self._keys.items())
