"""What is said of a pool, and the numbers of its blocks' states."""

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
    """What happens to a block whose name another block already has."""

    KEPT = "kept"
    """It stays in use as it is, until its user releases it."""
    REJECTED = "rejected"
    """Its user is given the other block, and it is free."""


class PoolStatus(Struct, frozen=True):
    """How many blocks are in use, kept unused, and empty."""

    active_blocks: int
    inactive_blocks: int
    empty_blocks: int


class ResetOutcome(Struct, frozen=True):
    """What became of names that were to be given up."""

    reset_blocks: list[bytes]
    not_found: list[bytes]
    not_reset: list[bytes]
    """Somebody uses them."""


class PoolCounters(Struct):
    """What a pool did since it was made."""

    allocations: int = 0
    evictions: int = 0
    """Of those, so many had held something."""
    registrations: int = 0
    duplicates: int = 0
    """Blocks whose name another had."""
    kept_duplicates: int = 0
    """Of those, so many stayed in use."""
    requested: int = 0
    """Blocks somebody wanted to use."""
    matched: int = 0
    scanned: int = 0
    """Blocks somebody looked for."""
    found: int = 0


class BlockMetadata(Struct, frozen=True, order=True):
    """What eviction goes by: lower goes first. Returned ticks are distinct, so that the acquired
    one never decides.
    """

    priority: int
    returned_tick: int
    acquired_tick: int


class NamedBlocks:
    """The names of a pool's blocks as they were: taken at once, and sorted at leisure."""

    __slots__ = ("_names", "_states")

    def __init__(self, names: Sequence[BlockName | None], states: bytes) -> None:
        self._names = names
        self._states = states

    def by_use(self) -> tuple[list[BlockName], list[BlockName]]:
        """Those in use, and the unused ones. O(blocks)."""
        names: tuple[list[BlockName], list[BlockName]] = [], []
        for name, state in zip(self._names, self._states, strict=True):
            if name is not None:
                names[state == UNUSED].append(name)
        return names
