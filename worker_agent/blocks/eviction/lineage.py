"""Only blocks that no other unused block comes after go; of those, the one returned first.

A prefix is worth something without its suffix, a suffix without its prefix nothing. So a prompt is
given up from its end, and no block is kept that no prompt can reach. Default of host and disk.
Source: `Lineage` of Dynamo's second block manager.

    a ── b ── c        leaves: c, e        c was returned before e: c goes, and b becomes a leaf
         └─── e                            once e is gone, too, at the time it was returned itself
"""

from collections.abc import Iterable

from sortedcontainers import SortedList

from worker_agent.blocks.eviction.base import Unused


class LineageEviction:
    """Adding, removing and taking out O(log leaves).

    Invariants: an unused block is a leaf exactly if no unused block has it for a parent. A parent
    need not be here, nor come first.
    """

    __slots__ = ("_block_of", "_children", "_leaves", "_unused")

    def __init__(self) -> None:
        self._unused: dict[int, Unused] = {}
        self._block_of: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}
        self._leaves: SortedList[tuple[int, bytes, int]] = SortedList()

    def __len__(self) -> int:
        return len(self._unused)

    def add(self, block: int, unused: Unused) -> None:
        """A leaf, unless something unused comes after it; its parent is none any more."""
        self._unused[block] = unused
        self._block_of[unused.name.identity] = block
        if unused.name.identity not in self._children:
            self._leaves.add(_key(block, unused))
        parent = unused.name.parent_identity
        if parent is None:
            return
        if parent not in self._children and parent in self._block_of:
            self._leaves.remove(self._key_of(parent))
        self._children[parent] = self._children.get(parent, 0) + 1

    def remove(self, block: int) -> None:
        """In use again. Raises KeyError."""
        unused = self._unused.pop(block)
        del self._block_of[unused.name.identity]
        if unused.name.identity not in self._children:
            self._leaves.remove(_key(block, unused))
        parent = unused.name.parent_identity
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._block_of:
                self._leaves.add(self._key_of(parent))

    def pop(self) -> int:
        """The leaf returned first. Raises KeyError when there is none."""
        if not self._leaves:
            raise KeyError("no unused block")
        block: int = self._leaves[0][2]
        self.remove(block)
        return block

    def note_uses(self, identities: Iterable[bytes]) -> None:
        """Only returning counts here."""

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring."""
        parents = [each.name.parent_identity for each in self._unused.values()]
        children = {each: parents.count(each) for each in set(parents) if each is not None}
        assert self._children == children
        assert self._block_of == {each.name.identity: block for block, each in self._unused.items()}
        leaves = [
            _key(block, each)
            for block, each in self._unused.items()
            if each.name.identity not in children
        ]
        assert list(self._leaves) == sorted(leaves)

    def _key_of(self, identity: bytes) -> tuple[int, bytes, int]:
        block = self._block_of[identity]
        return _key(block, self._unused[block])


def _key(block: int, unused: Unused) -> tuple[int, bytes, int]:
    return unused.returned_tick, unused.name.identity, block
