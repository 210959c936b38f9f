"""The blocks of all KV cache groups of a prompt in lower tiers, held until they are loaded.

A prompt is resumed at the last boundary at which every group stands: full attention with all blocks
before it, each window with the last ones before it. Blocks of all groups are held together, or
none is.
"""

from collections.abc import Sequence

from msgspec import Struct

from router.errors import KvRouterError
from worker_agent.connector.slots.block_groups import BlockGroups
from worker_agent.connector.slots.held_prefix import LowerTier, PinnedPrefix, hold
from worker_agent.connector.slots.slot_blocks import SlotBlocks


class HeldGroup(Struct, frozen=True):
    """Held blocks of one group, `first` and those behind it."""

    group: int
    first: int
    blocks: PinnedPrefix

    @property
    def places(self) -> slice:
        """The blocks' places in the group's table."""
        return slice(self.first, self.first + len(self.blocks))


class HeldGroups(Struct, frozen=True):
    """Held blocks of all groups, with which a prompt is resumed at `end` instead of at `start`.

    `full_end`: the last boundary before which full attention's blocks are held or the engine's.
    """

    start: int = 0
    end: int = 0
    full_end: int = 0
    parts: tuple[HeldGroup, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Number of held blocks."""
        return sum(len(part.blocks) for part in self.parts)

    def release(self) -> None:
        """Release all blocks; calling it again has no effect."""
        for part in self.parts:
            part.blocks.release()


NOTHING_HELD = HeldGroups()


def hold_groups(
    tiers: Sequence[LowerTier], blocks: SlotBlocks, groups: BlockGroups, start: int
) -> HeldGroups:
    """Hold what resumes a prompt as late as possible behind `start` tokens, which the engine has.

    At least one token is left to be computed. O(tokens). If a tier raises KvRouterError, all blocks
    are released and the error is raised.
    """
    found = _Search(tiers, blocks, groups, start)
    try:
        full_end = found.full()
        end = found.windows(full_end)
    except KvRouterError:
        found.release()
        raise
    found.drop_behind(end)
    return HeldGroups(start, end, full_end, tuple(found.parts))


class _Search:
    """The blocks held so far. `start`: number of tokens that the engine has."""

    __slots__ = ("_blocks", "_groups", "_start", "_tiers", "parts")

    def __init__(
        self, tiers: Sequence[LowerTier], blocks: SlotBlocks, groups: BlockGroups, start: int
    ) -> None:
        self._tiers = tiers
        self._blocks = blocks
        self._groups = groups
        self._start = start
        self.parts: list[HeldGroup] = []

    def full(self) -> int:
        """Hold full attention's blocks, and return the last boundary before which all are there."""
        end = self._blocks.last_boundary
        for index, group in self._groups.full:
            first, last = self._start // group.block_size, end // group.block_size
            if first < last:
                held = self._hold(index, first, last)
                end = self._groups.aligned((first + held) * group.block_size)
        return max(end, self._start)

    def windows(self, end: int) -> int:
        """Hold the windows' blocks before the last boundary up to `end` at which all are there.

        Returns the boundary. A block that is missing rules out each boundary that needs it.
        """
        num_full = len(self.parts)
        while end > self._start:
            missing = self._missing_before(end)
            if missing is None:
                return end
            for part in self.parts[num_full:]:
                part.blocks.release()
            del self.parts[num_full:]
            end = self._groups.aligned(missing)
        return self._start

    def drop_behind(self, end: int) -> None:
        """Release full attention's blocks behind the boundary, and all if nothing is gained."""
        for part in self.parts:
            size = self._groups.all[part.group].block_size
            part.blocks.drop_to(max(min(end // size - part.first, len(part.blocks)), 0))
        if end == self._start:
            self.release()
            self.parts.clear()

    def release(self) -> None:
        for part in self.parts:
            part.blocks.release()

    def _missing_before(self, end: int) -> int | None:
        """Hold the windows' blocks needed at `end`; return the first token of a missing one."""
        for index, group in self._groups.windows:
            first = max(self._start // group.block_size, group.first_needed(end))
            last = end // group.block_size
            held = self._hold(index, first, last)
            if first + held < last:
                return (first + held) * group.block_size
        return None

    def _hold(self, group: int, first: int, last: int) -> int:
        held = hold(self._tiers, self._blocks.names(group, first, last))
        self.parts.append(HeldGroup(group, first, held))
        return len(held)
