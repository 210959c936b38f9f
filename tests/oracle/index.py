"""The index as its definition says: a set of held hashes per rank and tier, and nothing clever.

The sets of classes follow those of the tiers: class c has the number of tiers plus c.
"""

import numpy as np

from oracle.hybrid import cached_tokens
from router.indexer.base import (
    DIFFERENT,
    DONE,
    ExportedBlocks,
    HeldSlice,
    HeldSummary,
    IndexStats,
    Overlap,
)
from router.protocol.events import ClassCleared, ClassStored, Cleared, Removed, Stored
from router.protocol.hybrid import MAX_CLASSES
from router.protocol.values import TIERS, Tier, unpack_hashes
from router.sequence.hashing._digest import digest

PLACES = range(TIERS + MAX_CLASSES)


class ExactIndex:
    """Implements `Indexer` by brute force; nothing is left to sweep, no search jumps."""

    def __init__(self):
        self.sets = {}
        self.layouts = {}
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
        for each in PLACES if tier is None else (tier,):
            self._set(rank, each).clear()
        if tier is None:
            self.layouts.pop(rank, None)

    def apply(self, rank, batch, progress, room_blocks):
        self._set_layout(rank, None if batch.hybrid is None else batch.hybrid.layout)
        for event in batch.events:
            self._apply(rank, event)
        says = HeldSummary.of(batch.state, batch.hybrid)
        return DONE if self.summary(rank) == says else DIFFERENT

    def _apply(self, rank, event):
        if isinstance(event, Cleared) and event.tier is None:
            for place in PLACES:
                self._set(rank, place).clear()
            return
        is_tier = isinstance(event, Stored | Removed | Cleared)
        place = event.tier if is_tier else TIERS + event.class_index
        if isinstance(event, Cleared | ClassCleared):
            self._set(rank, place).clear()
        else:
            change = self.store if isinstance(event, Stored | ClassStored) else self.remove
            change(rank, place, unpack_hashes(event.sequence_hashes))

    def _set_layout(self, rank, layout):
        self.layouts.pop(rank, None)
        if layout is not None:
            self.layouts[rank] = layout
            return
        for place in PLACES[TIERS:]:
            self._set(rank, place).clear()

    def stage(self, rank, place, sequence_hashes):
        self.staged.setdefault((rank, place), set()).update(sequence_hashes.tolist())
        return True

    def commit_staged(self, rank, layout=None):
        for place in PLACES:
            self.sets[rank, place] = self.staged.pop((rank, place), set())
        self._set_layout(rank, layout)

    def drop_staged(self, rank):
        for place in PLACES:
            self.staged.pop((rank, place), None)

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

    def resumable(self, sequence_hashes, isl_tokens, block_size):
        hashes, scores = sequence_hashes.tolist(), self.find_matches(sequence_hashes)
        for rank in scores.keys() & self.layouts.keys():
            tokens = self._cached_tokens(rank, hashes, isl_tokens, block_size)
            scores[rank] = Overlap(*[tokens // block_size] * TIERS)
        return scores

    def _cached_tokens(self, rank, hashes, isl_tokens, block_size):
        layout = self.layouts[rank]
        run_tokens = self._depth(rank, Tier.DEVICE, hashes) * block_size
        at = {(i + 1) * block_size: block for i, block in enumerate(hashes)}

        def holds_class(class_index, end):
            return at.get(end) in self._set(rank, TIERS + class_index)

        return cached_tokens(layout, lambda end: end <= run_tokens, holds_class, isl_tokens)

    def summary(self, rank):
        held = [self.held(rank, place) for place in PLACES]
        counts, digests = tuple(len(h) for h in held), tuple(digest(h) for h in held)
        if rank not in self.layouts:
            return HeldSummary(counts[:TIERS], digests[:TIERS])
        return HeldSummary(counts[:TIERS], digests[:TIERS], counts[TIERS:], digests[TIERS:])

    def held(self, rank, tier):
        return np.array(sorted(self._set(rank, tier)), dtype=np.uint64)

    def dump(self):
        for rank, tier in sorted(self.sets):
            if tier < TIERS and self.sets[rank, tier]:
                yield ExportedBlocks(rank, tier, self.held(rank, tier))

    def dump_slices(self):
        rank_of = dict(enumerate(sorted({rank for rank, _ in self.sets})))
        for number, rank in rank_of.items():
            for tier in Tier:
                held = self.held(rank, tier)
                words = np.full(len(held), number << 4 | 1 << tier, dtype=np.uint64)
                yield HeldSlice(rank_of, np.column_stack([words, held]))

    def dump_class_slices(self):
        rank_of = dict(enumerate(sorted({rank for rank, _ in self.sets})))
        for number, rank in rank_of.items():
            for index in Tier:
                held = self.held(rank, TIERS + index)
                words = np.full(len(held), number << 4 | 1 << index, dtype=np.uint64)
                yield HeldSlice(rank_of, np.column_stack([words, held]))

    def block_count(self):
        return len(set().union(*(held for (_, place), held in self.sets.items() if place < TIERS)))

    def sweep(self, sub_tables):
        return False

    def stats(self):
        return IndexStats(blocks=self.block_count())

    def close(self):
        pass
