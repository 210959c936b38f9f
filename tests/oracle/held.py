"""What a rank holds, in dicts and one block at a time: the definition that kernels are held to."""

from collections.abc import Iterable, Sequence

import numpy as np

from router.protocol.values import FASTEST_TIER, TIERS, HashArray, HeldState, Tier
from router.sequence.hashing._digest import digest


class _Block:
    """A held block, or (mask 0) the parent of one; `children[r]`: held ones, fastest in r."""

    __slots__ = ("children", "mask", "parent")

    def __init__(self, parent: int | None) -> None:
        self.mask = 0
        self.parent = parent
        self.children = [0] * TIERS

    @property
    def is_needed(self) -> bool:
        return bool(self.mask) or any(self.children)


class HeldBlocks:
    """Blocks of one rank by tier, as a set: a store of what is held and a removal of what is not do
    nothing. All changes are O(tiers) per block.

    Invariants: every block kept is held or has a held child; `children` count held blocks by their
    parent; holes, counts and digests equal what a walk over all blocks finds.
    """

    __slots__ = ("_blocks", "_counts", "_digests", "_holes")

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._holes = [0] * TIERS
        self._counts = [0] * TIERS
        self._digests = [0] * TIERS

    @property
    def block_count(self) -> int:
        """Held blocks, once per tier."""
        return sum(self._counts)

    def store(self, tier: Tier, sequence_hashes: Sequence[int], parent: int | None) -> list[int]:
        """Hold consecutive blocks, the first of them after `parent`; those that were new."""
        changed = []
        for sequence_hash in sequence_hashes:
            block = self._blocks.get(sequence_hash)
            mask = 0 if block is None else block.mask
            if not mask >> tier & 1:
                self._set(sequence_hash, parent, mask | 1 << tier)
                changed.append(sequence_hash)
            parent = sequence_hash
        self._note(tier, changed, +1)
        return changed

    def remove(self, tier: Tier, sequence_hashes: Iterable[int]) -> list[int]:
        """Hold these blocks no longer; those that were held."""
        changed = []
        for sequence_hash in sequence_hashes:
            block = self._blocks.get(sequence_hash)
            if block is not None and block.mask >> tier & 1:
                self._set(sequence_hash, block.parent, block.mask & ~(1 << tier))
                changed.append(sequence_hash)
        self._note(tier, changed, -1)
        return changed

    def clear(self, tier: Tier | None = None) -> None:
        """Hold nothing in this tier; None: in any."""
        for each in Tier if tier is None else (tier,):
            self.remove(each, self.held(each).tolist())

    def held(self, tier: Tier) -> HashArray:
        """Every block held in this tier, in the order of their first store."""
        hashes = [h for h, block in self._blocks.items() if block.mask >> tier & 1]
        return np.array(hashes, dtype=np.uint64)

    def state(self) -> HeldState:
        """Holes, counts and digests, as they travel."""
        return HeldState(tuple(self._holes), tuple(self._counts), tuple(self._digests))  # type: ignore[arg-type]

    def _set(self, sequence_hash: int, parent: int | None, mask: int) -> None:
        block = self._blocks.get(sequence_hash)
        if block is None:
            block = self._blocks[sequence_hash] = _Block(None)
        is_parent_new = block.parent is None
        if is_parent_new:
            block.parent = parent
        before, after = FASTEST_TIER[block.mask], FASTEST_TIER[mask]
        block.mask = mask
        self._count_holes_below(block, before, after)
        self._count_hole_above(block, TIERS if is_parent_new else before, after)
        if not block.is_needed:
            del self._blocks[sequence_hash]

    def _count_holes_below(self, block: _Block, before: int, after: int) -> None:
        sign = 1 if after > before else -1
        for tier in range(min(before, after), max(before, after)):
            self._holes[tier] += sign * sum(block.children[: tier + 1])

    def _count_hole_above(self, block: _Block, before: int, after: int) -> None:
        if block.parent is None:
            return
        parent = self._blocks.get(block.parent)
        if parent is None:
            parent = self._blocks[block.parent] = _Block(None)
        parent_tier = FASTEST_TIER[parent.mask]
        for tier in range(before, parent_tier):
            self._holes[tier] -= 1
        for tier in range(after, parent_tier):
            self._holes[tier] += 1
        if before < TIERS:
            parent.children[before] -= 1
        if after < TIERS:
            parent.children[after] += 1
        if not parent.is_needed:
            del self._blocks[block.parent]

    def _note(self, tier: Tier, changed: list[int], sign: int) -> None:
        self._counts[tier] += sign * len(changed)
        self._digests[tier] ^= digest(np.array(changed, dtype=np.uint64))

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(everything)."""
        children: dict[int, list[int]] = {}
        holes = [0] * TIERS
        for block in self._blocks.values():
            tier = FASTEST_TIER[block.mask]
            if tier == TIERS or block.parent is None:
                continue
            children.setdefault(block.parent, [0] * TIERS)[tier] += 1
            for hole in range(tier, FASTEST_TIER[self._blocks[block.parent].mask]):
                holes[hole] += 1
        for sequence_hash, block in self._blocks.items():
            assert block.is_needed
            assert block.children == children.get(sequence_hash, [0] * TIERS)
        assert holes == self._holes
        for tier_held in Tier:
            held = self.held(tier_held)
            assert self._counts[tier_held] == len(held)
            assert self._digests[tier_held] == digest(held)
