"""An exact radix tree, stored flat.

A node's key is the hash of its whole path, so the node at position i is one look-up away, and there
are no parent links to walk or to keep right:

    sequence hash ──▶ { rank ──▶ tier mask }            one entry per distinct block
    rank ──▶ { sequence hash ──▶ tier mask }, summary   the same facts, by holder

Invariants: the two maps hold the same (hash, rank, mask) triples; no mask is 0; no inner map is
empty; a rank's summary is the count and digest of its own map.
"""

import numpy as np

from router.indexer.base import HeldSummary, Overlap, OverlapScores
from router.protocol.values import FASTEST_TIER, TIERS, HashArray, Rank, Tier
from router.sequence.digest import digest


class _Holder:
    """What one rank holds."""

    __slots__ = ("counts", "digests", "masks")

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self.counts = [0] * TIERS
        self.digests = [0] * TIERS

    def note(self, tier: Tier, changed: list[int], sign: int) -> None:
        self.counts[tier] += sign * len(changed)
        self.digests[tier] ^= digest(np.array(changed, dtype=np.uint64))


class RadixTree:
    """The exact index in plain Python; implements `Indexer`."""

    __slots__ = ("_holders", "_nodes")

    def __init__(self) -> None:
        self._nodes: dict[int, dict[Rank, int]] = {}
        self._holders: dict[Rank, _Holder] = {}

    def store(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> None:
        """Note that the rank holds these blocks in this tier. O(blocks)."""
        holder = self._holders.get(rank) or _Holder()
        bit, changed = 1 << tier, []
        for sequence_hash in sequence_hashes.tolist():
            mask = holder.masks.get(sequence_hash, 0)
            if not mask & bit:
                self._set_mask(rank, holder, sequence_hash, mask | bit)
                changed.append(sequence_hash)
        holder.note(tier, changed, +1)
        if holder.masks:
            self._holders[rank] = holder

    def remove(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> None:
        """Note that it no longer does; blocks it does not hold there are passed over. O(blocks)."""
        holder = self._holders.get(rank)
        if holder is None:
            return
        bit, changed = 1 << tier, []
        for sequence_hash in sequence_hashes.tolist():
            mask = holder.masks.get(sequence_hash, 0)
            if mask & bit:
                self._set_mask(rank, holder, sequence_hash, mask & ~bit)
                changed.append(sequence_hash)
        holder.note(tier, changed, -1)
        if not holder.masks:
            del self._holders[rank]

    def clear(self, rank: Rank, tier: Tier | None = None) -> None:
        """Note that the rank holds nothing in this tier; None: in any. O(blocks held)."""
        for each in Tier if tier is None else (tier,):
            self.remove(rank, each, self.held(rank, each))

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """The longest held prefix of a prompt, per rank and cumulative tier.

        One walk: `slowest` is the slowest tier a rank has needed so far; when position i forces it
        from a to b, the overlaps of tiers a to b − 1 end at i. O(blocks · ranks still matching).
        """
        hashes = sequence_hashes.tolist()
        slowest = dict.fromkeys(self._nodes.get(hashes[0], ()) if hashes else (), 0)
        ends = {rank: [len(hashes)] * TIERS for rank in slowest}
        for position, sequence_hash in enumerate(hashes):
            node = self._nodes.get(sequence_hash, {})
            for rank, needed in list(slowest.items()):
                now_needed = FASTEST_TIER[node.get(rank, 0)]
                if now_needed > needed:
                    ends[rank][needed:now_needed] = [position] * (now_needed - needed)
                    slowest[rank] = now_needed
                    if now_needed == TIERS:
                        del slowest[rank]
            if not slowest:
                break
        return {rank: Overlap(*end) for rank, end in ends.items()}

    def summary(self, rank: Rank) -> HeldSummary:
        """Count and digest of what the rank holds. O(1)."""
        holder = self._holders.get(rank) or _Holder()
        return HeldSummary(tuple(holder.counts), tuple(holder.digests))  # type: ignore[arg-type]

    def held(self, rank: Rank, tier: Tier) -> HashArray:
        """Every block the rank holds in this tier, in no order. O(blocks held)."""
        holder = self._holders.get(rank) or _Holder()
        bit = 1 << tier
        return np.array([h for h, mask in holder.masks.items() if mask & bit], dtype=np.uint64)

    def block_count(self) -> int:
        """Distinct blocks held by anybody. O(1)."""
        return len(self._nodes)

    def check_invariants(self) -> None:
        """Assert the invariants in the module's docstring. O(everything)."""
        by_node = {(h, r): m for h, node in self._nodes.items() for r, m in node.items()}
        by_rank = {
            (h, r): m for r, holder in self._holders.items() for h, m in holder.masks.items()
        }
        assert by_node == by_rank
        assert all(by_node.values())
        assert all(self._nodes.values())
        assert all(holder.masks for holder in self._holders.values())
        for rank, holder in self._holders.items():
            for tier in Tier:
                held = self.held(rank, tier)
                assert holder.counts[tier] == len(held)
                assert holder.digests[tier] == digest(held)

    def _set_mask(self, rank: Rank, holder: _Holder, sequence_hash: int, mask: int) -> None:
        if mask:
            holder.masks[sequence_hash] = mask
            self._nodes.setdefault(sequence_hash, {})[rank] = mask
            return
        del holder.masks[sequence_hash]
        node = self._nodes[sequence_hash]
        del node[rank]
        if not node:
            del self._nodes[sequence_hash]
