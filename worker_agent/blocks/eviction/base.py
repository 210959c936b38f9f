"""In which order unused blocks are given up."""

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct

from worker_agent.blocks.names import BlockName


class Unused(Struct, frozen=True, gc=False):
    """A named block that nobody uses."""

    name: BlockName
    priority: int
    """Lower goes first."""
    returned_tick: int
    """When it was last in use: a count that grows."""


class Eviction(Protocol):
    """The unused blocks of a pool, in an order of its own. Each is in it once."""

    def __len__(self) -> int:
        """Unused blocks."""

    def add(self, block: int, unused: Unused) -> None:
        """A block is in use no longer."""

    def remove(self, block: int) -> None:
        """A block is in use again, or its name was taken away. Raises KeyError."""

    def pop(self) -> int:
        """Take out the block to give up first. Raises KeyError when there is none."""

    def note_uses(self, identities: Iterable[bytes]) -> None:
        """Somebody asked for what blocks hold, or computed it."""

    def check_invariants(self) -> None:
        """Assert what must hold. O(blocks)."""
