"""The index as its definition says: a set of held hashes per rank and tier, and nothing clever."""

import numpy as np

from router.indexer.base import (
    DIFFERENT,
    DONE,
    ExportedBlocks,
    HeldSlice,
    HeldSummary,
    IndexStats,
    Overlap,
)
from router.protocol.events import Cleared, Stored
from router.protocol.values import Tier, unpack_hashes
from router.sequence.hashing._digest import digest


class ExactIndex:
    """Implements `Indexer` by brute force; nothing is left to sweep, no search jumps."""

    def __init__(self):
        self.sets = {}
        self.staged = {}
        self.differing = {}

    def _set(self, rank, tier):
        return self.sets.setdefault((rank, tier), set())

    def expect(self, ranks):
        pass

    def store(self, rank, tier, sequence_hashes):
        self._set(rank, tier).update(sequence_hashes.tolist())
        return True

    def remove(self, rank, tier, sequence_hashes):
        self._set(rank, tier).difference_update(sequence_hashes.tolist())
        return True

    def clear(self, rank, tier=None):
        for each in Tier if tier is None else (tier,):
            self._set(rank, each).clear()

    def apply(self, rank, batch, progress, room_blocks):
        for event in batch.events:
            if isinstance(event, Cleared):
                self.clear(rank, event.tier)
            else:
                change = self.store if isinstance(event, Stored) else self.remove
                change(rank, event.tier, unpack_hashes(event.sequence_hashes))
        says = HeldSummary(batch.state.counts, batch.state.digests)
        return DONE if self.summary(rank) == says else DIFFERENT

    def stage(self, rank, tier, sequence_hashes):
        self.staged.setdefault((rank, tier), set()).update(sequence_hashes.tolist())
        return True

    def commit_staged(self, rank):
        for tier in Tier:
            self.sets[rank, tier] = self.staged.pop((rank, tier), set())

    def drop_staged(self, rank):
        for tier in Tier:
            self.staged.pop((rank, tier), None)

    def note_holes(self, rank, holes):
        pass

    def check(self, rank, expected):
        if self.summary(rank) != expected:
            self.differing[rank] = None

    def take_differing(self):
        differing, self.differing = list(self.differing), {}
        return differing

    def find_matches(self, sequence_hashes):
        hashes = sequence_hashes.tolist()
        ranks = {rank for rank, _ in self.sets}
        scores = {}
        for rank in ranks:
            depths = [self._depth(rank, tier, hashes) for tier in Tier]
            if depths[-1]:
                scores[rank] = Overlap(*depths)
        return scores

    def _depth(self, rank, slowest, hashes):
        held = set().union(*(self._set(rank, tier) for tier in Tier if tier <= slowest))
        return next((i for i, h in enumerate(hashes) if h not in held), len(hashes))

    def summary(self, rank):
        held = [self.held(rank, tier) for tier in Tier]
        return HeldSummary(tuple(len(h) for h in held), tuple(digest(h) for h in held))

    def held(self, rank, tier):
        return np.array(sorted(self._set(rank, tier)), dtype=np.uint64)

    def dump(self):
        for rank, tier in sorted(self.sets):
            if self.sets[rank, tier]:
                yield ExportedBlocks(rank, tier, self.held(rank, tier))

    def dump_slices(self):
        rank_of = dict(enumerate(sorted({rank for rank, _ in self.sets})))
        for number, rank in rank_of.items():
            for tier in Tier:
                held = self.held(rank, tier)
                words = np.full(len(held), number << 4 | 1 << tier, dtype=np.uint64)
                yield HeldSlice(rank_of, np.column_stack([words, held]))

    def block_count(self):
        return len(set().union(*self.sets.values())) if self.sets else 0

    def sweep(self, sub_tables):
        return False

    def stats(self):
        return IndexStats(blocks=self.block_count())

    def close(self):
        pass
