"""One rank's journal with several sources: its engine, and a block manager beside it.

    engine's events ──▶ Normalizer ──▶ OneSource ─┐  the blocks of each source, by tier
    manager's news  ──▶ TierFeed   ──▶ OneSource ─┴─▶ EventJournal: the blocks of any source

A block is in a tier while at least one source has it there. So a tier that both sources report is
counted once, and a source that starts again removes only its own blocks.

The journal interface of one source of a rank's events.

The journal belongs to the source alone, or is its part of a shared one (`consolidator.py`).
"""

from functools import reduce
from operator import or_
from typing import Protocol

from router.protocol.hybrid import Layout
from router.protocol.values import U64_MAX, HashArray, HeldState, Identity, Tier
from router.publisher.journal.held_blocks import DEFAULT_MULTIPLIER, HeldBlocks
from router.publisher.journal.journal import EventJournal
from router.sequence.hashing.keyed_hashes import HashKeying

_SPREAD = 0xD1342543DE82EF95
"""An odd factor, so that an odd multiplier stays odd."""


class JournalConsolidator:
    """A factory of the sources of one journal, which has no other writers.

    Invariant: the journal holds, in each tier, the blocks that any source holds there, and has the
    doubts that any source has.
    """

    __slots__ = ("_multiplier", "journal", "sources")

    def __init__(self, journal: EventJournal, multiplier: int = DEFAULT_MULTIPLIER) -> None:
        """Create the sources' common part.

        `multiplier`: the journal's. Sources use other ones: keys read in the order of one hash
        table form clusters in another table with the same multiplier.
        """
        self.journal = journal
        self.sources: list[SourceView] = []
        self._multiplier = multiplier

    def source(self) -> "SourceView":
        """Add a source, and return it."""
        self._multiplier = self._multiplier * _SPREAD % (U64_MAX + 1)
        source = SourceView(self, HeldBlocks(self._multiplier))
        self.sources.append(source)
        return source

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring. O(everything held)."""
        for tier in Tier:
            held = {h for source in self.sources for h in source.held(tier).tolist()}
            assert held == set(self.journal.held(tier).tolist())
        assert self.journal.doubts == reduce(or_, (s.state.doubts for s in self.sources), 0)


class SourceView:
    """One source's blocks; a `SourceJournal`. All changes are O(tiers × sources) per block."""

    __slots__ = ("_all", "_doubts", "_has_layout", "_held", "naming")

    def __init__(self, consolidated: JournalConsolidator, held: HeldBlocks) -> None:
        self.naming: HashKeying = consolidated.journal.naming
        self._all = consolidated
        self._held = held
        self._doubts = 0
        self._has_layout = False

    @property
    def identity(self) -> Identity:
        """The parameters that determine block hashes."""
        return self._all.journal.identity

    @property
    def incarnation(self) -> int:
        """The rank's current incarnation."""
        return self._all.journal.incarnation

    @property
    def state(self) -> HeldState:
        """The digest of this source's blocks, and its doubts."""
        return self._held.state(self._doubts)

    @property
    def has_news(self) -> bool:
        """True if the journal has a message to take, from any source."""
        return self._all.journal.has_news

    def stored_paths(self, tier: Tier, sequence_hashes: HashArray, heads: HashArray) -> HashArray:
        """Store runs of consecutive blocks in a tier. Returns those new to this source."""
        new = self._held.store_paths(tier, sequence_hashes, heads)
        if len(new):
            self._all.journal.stored_paths(tier, sequence_hashes, heads)
        return new

    def removed(self, tier: Tier, sequence_hashes: HashArray) -> HashArray:
        """Remove blocks from a tier. Returns those that this source held there."""
        gone = self._held.remove(tier, sequence_hashes)
        self._take_back(tier, gone)
        return gone

    def cleared(self, tier: Tier | None = None) -> None:
        """Remove all blocks of this source from a tier, or from all tiers if it is None."""
        if not self._others_hold(tier):
            self._held.clear(tier)
            self._all.journal.cleared(tier)
            return
        for each in Tier if tier is None else (tier,):
            gone = self._held.held(each)
            self._held.clear(each)
            self._take_back(each, gone)

    def held(self, tier: Tier) -> HashArray:
        """Return all blocks that this source holds in a tier, unordered. O(capacity)."""
        return self._held.held(tier)

    def paths(self, tier: Tier) -> tuple[HashArray, HashArray]:
        """Return the blocks of a tier with their parents, in the form that `stored_paths` accepts.

        O(capacity).
        """
        return self._held.paths(tier)

    def new_life(self, incarnation: int) -> None:
        """Start a new life of this source and the rank; publish the other sources' blocks again.

        O(blocks of the other sources).
        """
        self._held.clear()
        self._all.journal.new_life(incarnation, keeps_classes=not self._has_layout)
        self._has_layout = False
        for other in self._all.sources:
            for tier in Tier:
                self._all.journal.stored_paths(tier, *other.paths(tier))

    def set_layout(self, layout: Layout | None) -> None:
        """Set the layout of a hybrid model; only the engine's source has one."""
        self._has_layout = layout is not None
        self._all.journal.set_layout(layout)

    def class_stored(self, index: int, names: HashArray) -> None:
        """Store blocks in a class of the layout."""
        self._all.journal.class_stored(index, names)

    def class_removed(self, index: int, names: HashArray) -> None:
        """Remove blocks from a class."""
        self._all.journal.class_removed(index, names)

    def classes_cleared(self) -> None:
        """Remove all blocks from all classes."""
        self._all.journal.classes_cleared()

    def held_in_class(self, index: int) -> HashArray:
        """Return all blocks that a class holds, unordered."""
        return self._all.journal.held_in_class(index)

    def set_doubts(self, doubts: int) -> None:
        """Set this source's doubts."""
        self._doubts = doubts
        self._all.journal.set_doubts(reduce(or_, (s.state.doubts for s in self._all.sources)))

    def require_checkpoint(self) -> None:
        """Make the next message a checkpoint."""
        self._all.journal.require_checkpoint()

    def _take_back(self, tier: Tier, gone: HashArray) -> None:
        """Remove blocks from the rank, unless another source holds them."""
        for other in self._all.sources:
            if other is not self and len(gone):
                gone = other._held.absent(tier, gone)
        if len(gone):
            self._all.journal.removed(tier, gone)

    def _others_hold(self, tier: Tier | None) -> bool:
        others = (s.state.counts for s in self._all.sources if s is not self)
        return any(any(counts) if tier is None else counts[tier] for counts in others)


class SourceJournal(Protocol):
    """A journal of one source. Blocks have bus names; `state` and `held` cover this source only."""

    naming: HashKeying

    @property
    def identity(self) -> Identity:
        """The parameters that determine block hashes."""

    @property
    def incarnation(self) -> int:
        """The rank's current incarnation."""

    @property
    def state(self) -> HeldState:
        """The digest of the held blocks."""

    @property
    def has_news(self) -> bool:
        """True if there is a message to take."""

    def stored_paths(self, tier: Tier, sequence_hashes: HashArray, heads: HashArray) -> HashArray:
        """Store runs of consecutive blocks (`held.path_heads`) in a tier. Returns the new ones."""

    def removed(self, tier: Tier, sequence_hashes: HashArray) -> HashArray:
        """Remove blocks from a tier. Returns those that were held in it."""

    def cleared(self, tier: Tier | None = None) -> None:
        """Remove everything from a tier, or from all tiers if it is None."""

    def held(self, tier: Tier) -> HashArray:
        """Return all blocks held in a tier, unordered."""

    def set_layout(self, layout: Layout | None) -> None:
        """Set the layout of a hybrid model, part of every message from now on."""

    def class_stored(self, index: int, names: HashArray) -> None:
        """Store blocks in a class of the layout."""

    def class_removed(self, index: int, names: HashArray) -> None:
        """Remove blocks from a class."""

    def classes_cleared(self) -> None:
        """Remove all blocks from all classes."""

    def held_in_class(self, index: int) -> HashArray:
        """Return all blocks that a class holds, unordered."""

    def new_life(self, incarnation: int) -> None:
        """Start a new life of the cache, which is empty."""

    def set_doubts(self, doubts: int) -> None:
        """Set the sum of `Doubt`s, part of every state from now on."""

    def require_checkpoint(self) -> None:
        """Make the next message a checkpoint."""
