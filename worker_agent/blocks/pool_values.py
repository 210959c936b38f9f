"""Values that describe a pool, and the numbers of its blocks' states."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct

from worker_agent.blocks.names import BlockName

FREE: Final = 0
PRIVATE: Final = 1
SHARED: Final = 2
NAMELESS: Final = 3
UNUSED: Final = 4
STATES: Final = ("free", "private", "shared", "nameless", "unused")


class Duplicates(StrEnum):
    """A treatment of a block if another one already has its name."""

    KEPT = "kept"
    """It stays in use as it is, until its user releases it."""
    REJECTED = "rejected"
    """Its user receives the other block, and it becomes free."""


class PoolStatus(Struct, frozen=True):
    """The numbers of blocks that are in use, kept unused, and empty."""

    active_blocks: int
    inactive_blocks: int
    empty_blocks: int


class ResetOutcome(Struct, frozen=True):
    """The results of removing names, by identity."""

    reset_blocks: list[bytes]
    not_found: list[bytes]
    not_reset: list[bytes]
    """Blocks in use, which keep their names."""


class PoolCounters(Struct):
    """Totals of a pool since it was made."""

    allocations: int = 0
    evictions: int = 0
    """Allocated blocks that had a name before."""
    registrations: int = 0
    duplicates: int = 0
    """Registered blocks with a name that another block had."""
    kept_duplicates: int = 0
    """Duplicates that stayed in use."""
    requested: int = 0
    """Blocks that requests needed."""
    matched: int = 0
    scanned: int = 0
    """Blocks that were looked up without use."""
    found: int = 0


class BlockMetadata(Struct, frozen=True, order=True):
    """The order of eviction: the lowest goes first.

    Returned ticks are distinct, so the acquired tick never decides.
    """

    priority: int
    returned_tick: int
    acquired_tick: int


class NamedBlocks:
    """The names of a pool's blocks at one time: copied at once, sorted later."""

    __slots__ = ("_names", "_states")

    def __init__(self, names: Sequence[BlockName | None], states: bytes) -> None:
        self._names = names
        self._states = states

    def by_use(self) -> tuple[list[BlockName], list[BlockName]]:
        """Return the names of blocks in use, and those of unused blocks. O(blocks)."""
        names: tuple[list[BlockName], list[BlockName]] = [], []
        for name, state in zip(self._names, self._states, strict=True):
            if name is not None:
                names[state == UNUSED].append(name)
        return names
