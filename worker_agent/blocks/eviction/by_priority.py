"""The block of the lowest priority goes first; of equals, the one returned first.

Source: the inactive pool of Dynamo's first block manager (`priority_set`).
"""

from collections.abc import Iterable

from sortedcontainers import SortedList

from worker_agent.blocks.eviction.base import Unused


class PriorityEviction:
    """Every operation O(log blocks)."""

    __slots__ = ("_keys", "_order")

    def __init__(self) -> None:
        self._keys: dict[int, tuple[int, int, bytes, int]] = {}
        self._order: SortedList[tuple[int, int, bytes, int]] = SortedList()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, block: int, unused: Unused) -> None:
        """By priority, then time, then what it holds."""
        key = (unused.priority, unused.returned_tick, unused.name.identity, block)
        self._keys[block] = key
        self._order.add(key)

    def remove(self, block: int) -> None:
        """In use again. Raises KeyError."""
        self._order.remove(self._keys.pop(block))

    def pop(self) -> int:
        """The lowest. Raises KeyError when there is none."""
        if not self._order:
            raise KeyError("no unused block")
        block: int = self._order.pop(0)[3]
        del self._keys[block]
        return block

    def note_uses(self, identities: Iterable[bytes]) -> None:
        """Only returning counts here."""

    def check_invariants(self) -> None:
        """Assert that both views hold the same."""
        assert sorted(self._keys.values()) == list(self._order)
        assert all(key[3] == block for block, key in self._keys.items())
