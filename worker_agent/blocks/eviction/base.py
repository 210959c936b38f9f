"""In which order unused blocks are given up."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from worker_agent.blocks.names import BlockName


class Unused(Struct, frozen=True, gc=False):
    """A named block that nobody uses."""

    name: BlockName
    priority: int
    """Lower goes first."""
    returned_tick: int
    """When it was last in use: a count that grows, another for each block."""


class Eviction(Protocol):
    """The unused blocks of a pool, in an order of its own. Each is in it once."""

    def __len__(self) -> int:
        """Unused blocks."""

    def add(self, blocks: Sequence[int], unused: Sequence[Unused]) -> None:
        """Blocks are in use no longer, the first to be returned first."""

    def remove(self, blocks: Iterable[int]) -> None:
        """Blocks are in use again, or their names were taken away. Raises KeyError."""

    def pop(self, count: int) -> list[int]:
        """Take out the blocks to give up first. Raises KeyError, taking none, for too many."""

    def note_uses(self, identities: Sequence[bytes]) -> None:
        """Somebody asked for what blocks hold, or computed it."""

    def check_invariants(self) -> None:
        """Assert what must hold. O(blocks)."""


def check_count(eviction: Eviction, count: int) -> None:
    """Raises KeyError when there are fewer blocks."""
    if count > len(eviction):
        raise KeyError(f"{count} of {len(eviction)} unused blocks")
