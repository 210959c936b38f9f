"""The block that was returned first goes first."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from worker_agent.blocks.eviction.base import Unused, check_count


class LruEviction:
    """O(1) a block. Default of the device tier, where prompts are returned tail first."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Sequence[int], unused: Sequence[Unused]) -> None:
        """Last of all."""
        del unused
        self._blocks.update(dict.fromkeys(blocks))

    def remove(self, blocks: Iterable[int]) -> None:
        """In use again. Raises KeyError."""
        for block in blocks:
            del self._blocks[block]

    def pop(self, count: int) -> list[int]:
        """The first. Raises KeyError when there are fewer."""
        check_count(self, count)
        popitem = self._blocks.popitem
        return [popitem(last=False)[0] for _ in range(count)]

    def note_uses(self, identities: Sequence[bytes]) -> None:
        """Only returning counts here."""

    def check_invariants(self) -> None:
        """Nothing can be wrong."""
