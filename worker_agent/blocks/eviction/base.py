"""The order of eviction of unused blocks."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from worker_agent.blocks.names import BlockName


class Unused(Struct, frozen=True, gc=False):
    """A named block that is not in use."""

    name: BlockName
    priority: int
    """The eviction priority: lower goes first."""
    returned_tick: int
    """The time of its last release: a count that grows, different for each block."""


class Eviction(Protocol):
    """The unused blocks of a pool, in the policy's order. Each block is in it once."""

    def __len__(self) -> int:
        """Return the number of unused blocks."""

    def add(self, blocks: Sequence[int], unused: Sequence[Unused]) -> None:
        """Add blocks that are no longer in use, in the order of their release."""

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove blocks that are in use again, or have lost their names. Raises KeyError."""

    def pop(self, count: int) -> list[int]:
        """Remove and return the next blocks to evict. Raises KeyError if there are fewer."""

    def note_uses(self, identities: Sequence[bytes]) -> None:
        """Count that requests needed the content of these blocks, or computed it."""

    def check_invariants(self) -> None:
        """Assert the policy's invariants. O(blocks)."""


def check_count(eviction: Eviction, count: int) -> None:
    """Raise KeyError if there are fewer blocks."""
    if count > len(eviction):
        raise KeyError(f"{count} of {len(eviction)} unused blocks")
