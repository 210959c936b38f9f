"""The block that was returned first goes first."""

from collections import OrderedDict
from collections.abc import Iterable

from worker_agent.blocks.eviction.base import Unused


class LruEviction:
    """Every operation O(1). Default of the device tier, where prompts are returned tail first."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: int, unused: Unused) -> None:
        """Last of all."""
        del unused
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        """In use again. Raises KeyError."""
        del self._blocks[block]

    def pop(self) -> int:
        """The first. Raises KeyError when there is none."""
        return self._blocks.popitem(last=False)[0]

    def note_uses(self, identities: Iterable[bytes]) -> None:
        """Only returning counts here."""

    def check_invariants(self) -> None:
        """Nothing can be wrong."""
