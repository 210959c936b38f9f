"""The index as its definition says: a set of held hashes per rank and tier, and nothing clever."""

import numpy as np

from router.indexer.base import HeldSummary, Overlap
from router.protocol.values import Tier
from router.sequence.digest import digest


class ExactIndex:
    """Implements `Indexer` by brute force."""

    def __init__(self):
        self.sets = {}

    def _set(self, rank, tier):
        return self.sets.setdefault((rank, tier), set())

    def store(self, rank, tier, sequence_hashes):
        self._set(rank, tier).update(sequence_hashes.tolist())

    def remove(self, rank, tier, sequence_hashes):
        self._set(rank, tier).difference_update(sequence_hashes.tolist())

    def clear(self, rank, tier=None):
        for each in Tier if tier is None else (tier,):
            self._set(rank, each).clear()

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

    def block_count(self):
        return len(set().union(*self.sets.values())) if self.sets else 0
