"""An estimate of the blocks that ranks hold, derived from the prompts that were routed to them.

For engines that publish no events, and beside the exact index for blocks not yet published. Each
block has one entry, and everything else is kept per prompt:

    rank ──▶ { sequence hash ──▶ the last prompt that named it }        `LastPromptIndex`
    serial of a prompt, in order ──▶ rank, expiry, hashes, number of blocks it was the last to name

A block lives as long as the last prompt that named it. Every prompt names its blocks from the first
on, so no block outlives its parent, and the rest of a prompt is always a prefix of it.
"""

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import astuple

from router.indexer.base import (
    HeldSlice,
    HeldSummary,
    Indexer,
    Overlap,
    OverlapScores,
    SearchedTree,
)
from router.indexer.last_prompt import LastPromptIndex
from router.protocol.values import HashArray, PerTier, Rank, Tier
from router.sequence.hashing._digest import digest

_NO_HOLES: PerTier = (0, 0, 0, 0)


class ApproximateLimits(Struct, frozen=True):
    """Lifetime of an estimated block, and limit of (rank, block) entries.

    `prune_target`: fraction (0 to 1) of the limit. Beyond the limit, the entries that expire first
    are pruned down to it: not at once, but with each insertion somewhat more than it adds.
    """

    ttl_s: float = 120.0
    max_blocks: int = 2**20
    prune_target: float = 0.8


PRUNE_BLOCKS = 512
"""Blocks that an insertion frees while pruning, beyond twice those it adds."""


class _Prompt(Struct):
    """One routed prompt. At most half of `sequence_hashes` were named again by later prompts."""

    rank: Rank
    expires_s: float
    sequence_hashes: HashArray
    live_blocks: int


class ApproximateIndex:
    """Blocks of routed prompts, held by the chosen ranks until they expire. Time never goes back.

    Owns the given index, which should have room for `max_blocks` and the longest prompt.
    Invariants: the index holds exactly the entries, on the device; every entry's prompt is kept,
    and no prompt without entries; at least half of the hashes kept in prompts are entries; there
    are at most `max_blocks` entries.
    """

    __slots__ = (
        "_entries",
        "_index",
        "_is_pruning",
        "_latest",
        "_limits",
        "_prompts",
        "_serial",
        "expired_blocks",
        "pruned_blocks",
    )

    def __init__(self, index: Indexer, limits: ApproximateLimits) -> None:
        self._index = index
        self._limits = limits
        self._latest: dict[Rank, LastPromptIndex] = {}
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._is_pruning = False
        self._serial = 0
        self._entries = 0
        self.expired_blocks = 0
        self.pruned_blocks = 0

    def insert(self, rank: Rank, sequence_hashes: HashArray, now_s: float) -> bool:
        """Count a prompt's blocks as held by this rank for `ttl_s`. Amortised O(blocks).

        The blocks must begin with the prompt's first. Beyond the limit, the entries that expire
        first are pruned, the deepest of a prompt first. Returns False, and changes nothing, if the
        index has no room.
        """
        if not len(sequence_hashes):
            return True
        if not self._store(rank, sequence_hashes):
            return False
        self._book(rank, sequence_hashes, now_s + self._limits.ttl_s)
        self._is_pruning |= self._entries > self._limits.max_blocks
        if self._is_pruning:
            self._prune(2 * len(sequence_hashes) + PRUNE_BLOCKS)
        return True

    def expire(self, now_s: float, max_blocks: int) -> int:
        """Free due entries, at most `max_blocks`. Returns the number of (rank, block) entries."""
        freed = 0
        while freed < max_blocks:
            first = next(iter(self._prompts.values()), None)
            if first is None or first.expires_s > now_s:
                break
            freed += self._cut_first(max_blocks - freed)
        self.expired_blocks += freed
        return freed

    def remove_rank(self, rank: Rank) -> None:
        """Remove a rank; unknown ones are ignored. O(its blocks); `sweep` frees them later."""
        latest = self._latest.pop(rank, None)
        if latest is None:
            return
        self._entries -= len(latest)
        for serial in latest.serials():
            del self._prompts[serial]
        self._index.clear(rank)

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """Return the longest unexpired prefix of a prompt that was routed to each rank."""
        return self._index.find_matches(sequence_hashes)

    @property
    def trees(self) -> tuple[SearchedTree, ...]:
        """The trees that `find_matches` searches."""
        return self._index.trees

    def dump_slices(self) -> Iterator[HeldSlice]:
        """Yield every entry, in slices; see `Indexer`."""
        return self._index.dump_slices()

    def entry_count(self) -> int:
        """Return the number of (rank, block) entries. O(1)."""
        return self._entries

    def held_blocks(self, rank: Rank) -> int:
        """Return the number of a rank's entries. O(1)."""
        return len(self._latest.get(rank, ()))

    def sweep(self, sub_tables: int) -> bool:
        """Free a slice of the blocks of removed ranks. Returns False once nothing is left."""
        return self._index.sweep(sub_tables)

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(size of the index)."""
        for rank, latest in self._latest.items():
            held = latest.blocks()
            expected = HeldSummary((len(held), 0, 0, 0), (digest(held), 0, 0, 0))
            assert self._index.summary(rank) == expected
            assert len(held) == len(latest) > 0
        assert self._entries == sum(map(len, self._latest.values())) <= self._limits.max_blocks
        assert self._entries == sum(prompt.live_blocks for prompt in self._prompts.values())
        expiries = [prompt.expires_s for prompt in self._prompts.values()]
        assert expiries == sorted(expiries)
        for serial, prompt in self._prompts.items():
            live = self._live(serial, prompt.rank, prompt.sequence_hashes)
            assert 0 < prompt.live_blocks == len(live)
            assert len(prompt.sequence_hashes) <= 2 * len(live)

    def _store(self, rank: Rank, sequence_hashes: HashArray) -> bool:
        """Store all blocks, or none. Returns False if there is no room."""
        known = self._latest.get(rank)
        has_room = self._index.store(rank, Tier.DEVICE, sequence_hashes)
        if not has_room:
            is_new = slice(None) if known is None else known.of(sequence_hashes) == 0
            self._index.remove(rank, Tier.DEVICE, sequence_hashes[is_new])
        if has_room or known is not None:
            self._index.note_holes(rank, _NO_HOLES)
        return has_room

    def _book(self, rank: Rank, sequence_hashes: HashArray, expires_s: float) -> None:
        """Set a new prompt as the last one that named these blocks. Amortised O(blocks)."""
        self._serial += 1
        latest = self._latest.get(rank)
        if latest is None:
            latest = self._latest[rank] = LastPromptIndex()
        named = latest.name(sequence_hashes, self._serial)
        for earlier, blocks in named.superseded:
            self._take_live(earlier, blocks)
        self._entries += named.new_blocks
        self._prompts[self._serial] = _Prompt(rank, expires_s, named.blocks, len(named.blocks))

    def _prune(self, max_blocks: int) -> None:
        target = int(self._limits.prune_target * self._limits.max_blocks)
        goal = max(target, self._entries - max_blocks)
        while self._entries > goal:
            self.pruned_blocks += self._cut_first(self._entries - goal)
        self._is_pruning = self._entries > target

    def _cut_first(self, max_blocks: int) -> int:
        """Free up to `max_blocks` hashes at the end of the prompt that expires first.

        Returns the number of entries freed.
        """
        serial, prompt = next(iter(self._prompts.items()))
        kept_blocks = max(0, len(prompt.sequence_hashes) - max_blocks)
        latest = self._latest[prompt.rank]
        live = self._live(serial, prompt.rank, prompt.sequence_hashes[kept_blocks:])
        prompt.sequence_hashes = prompt.sequence_hashes[:kept_blocks]
        self._index.remove(prompt.rank, Tier.DEVICE, live)
        latest.forget(live)
        if len(latest):
            self._index.note_holes(prompt.rank, _NO_HOLES)
        else:
            del self._latest[prompt.rank]
        self._entries -= len(live)
        self._take_live(serial, len(live))
        return len(live)

    def _take_live(self, serial: int, blocks: int) -> None:
        """Subtract blocks that are no longer a prompt's own.

        If more dead than live blocks were kept, a long shared prefix would fill the memory. Each
        compaction drops at least half of the hashes it walks over.
        """
        prompt = self._prompts[serial]
        prompt.live_blocks -= blocks
        if not prompt.live_blocks:
            del self._prompts[serial]
        elif len(prompt.sequence_hashes) > 2 * prompt.live_blocks:
            prompt.sequence_hashes = self._live(serial, prompt.rank, prompt.sequence_hashes)

    def _live(self, serial: int, rank: Rank, hashes: HashArray) -> HashArray:
        live: HashArray = hashes[self._latest[rank].of(hashes) == serial]
        return live


def merge_maximum(a: OverlapScores, b: OverlapScores) -> OverlapScores:
    """Return, per rank and tier, the longer overlap of two search results. O(ranks)."""
    merged = dict(a.items())
    for rank, overlap in b.items():
        other = merged.get(rank)
        if other is not None:
            overlap = Overlap(*map(max, astuple(overlap), astuple(other)))
        merged[rank] = overlap
    return merged
