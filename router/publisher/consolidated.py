"""One rank's journal that several sources are told to: its engine, and a block manager beside it.

    engine's events ──▶ Normalizer ──▶ OneSource ─┐  what each of them holds, by tier
    manager's news  ──▶ TierFeed   ──▶ OneSource ─┴─▶ EventJournal: what any of them holds

A block is in a tier from when the first of them has it there until none has. So a tier that both
tell of is counted once, and whoever begins anew takes back what is its own, and nothing else.
"""

from functools import reduce
from operator import or_

from router.protocol.values import U64_MAX, HashArray, HeldState, Identity, Tier
from router.publisher.held import DEFAULT_MULTIPLIER, HeldBlocks
from router.publisher.journal import EventJournal
from router.sequence.naming import BlockNaming

_SPREAD = 0xD1342543DE82EF95
"""Odd, so that an odd multiplier stays one."""


class ConsolidatedJournal:
    """Hands out the sources of one journal, which nobody else writes to.

    Invariant: the journal holds, in each tier, what any of the sources holds there, and doubts what
    any of them doubts.
    """

    __slots__ = ("_multiplier", "journal", "sources")

    def __init__(self, journal: EventJournal, multiplier: int = DEFAULT_MULTIPLIER) -> None:
        """`multiplier`: the journal's. Sources have others: keys in one table's order crowd another
        that spreads them alike.
        """
        self.journal = journal
        self.sources: list[OneSource] = []
        self._multiplier = multiplier

    def source(self) -> "OneSource":
        """One more of them."""
        self._multiplier = self._multiplier * _SPREAD % (U64_MAX + 1)
        source = OneSource(self, HeldBlocks(self._multiplier))
        self.sources.append(source)
        return source

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring. O(everything held)."""
        for tier in Tier:
            held = {h for source in self.sources for h in source.held(tier).tolist()}
            assert held == set(self.journal.held(tier).tolist())
        assert self.journal.doubts == reduce(or_, (s.state.doubts for s in self.sources), 0)


class OneSource:
    """What one source holds; a `SourceJournal`. All changes are O(tiers × sources) per block."""

    __slots__ = ("_all", "_doubts", "_held", "naming")

    def __init__(self, consolidated: ConsolidatedJournal, held: HeldBlocks) -> None:
        self.naming: BlockNaming = consolidated.journal.naming
        self._all = consolidated
        self._held = held
        self._doubts = 0

    @property
    def identity(self) -> Identity:
        """How blocks are named."""
        return self._all.journal.identity

    @property
    def incarnation(self) -> int:
        """The rank's present life."""
        return self._all.journal.incarnation

    @property
    def state(self) -> HeldState:
        """What this source holds, and doubts."""
        return self._held.state(self._doubts)

    @property
    def has_news(self) -> bool:
        """Has the journal a message to take, whoever caused it?"""
        return self._all.journal.has_news

    def stored_paths(self, tier: Tier, sequence_hashes: HashArray, heads: HashArray) -> HashArray:
        """Runs of consecutive blocks are now in this tier; those new to this source."""
        new = self._held.store_paths(tier, sequence_hashes, heads)
        if len(new):
            self._all.journal.stored_paths(tier, sequence_hashes, heads)
        return new

    def removed(self, tier: Tier, sequence_hashes: HashArray) -> HashArray:
        """Blocks are no longer in this tier; those that this source held there."""
        gone = self._held.remove(tier, sequence_hashes)
        self._take_back(tier, gone)
        return gone

    def cleared(self, tier: Tier | None = None) -> None:
        """A tier of this source is empty; None: all are."""
        if not self._others_hold(tier):
            self._held.clear(tier)
            self._all.journal.cleared(tier)
            return
        for each in Tier if tier is None else (tier,):
            gone = self._held.held(each)
            self._held.clear(each)
            self._take_back(each, gone)

    def held(self, tier: Tier) -> HashArray:
        """Every block that this source holds in a tier, in no order. O(capacity)."""
        return self._held.held(tier)

    def paths(self, tier: Tier) -> tuple[HashArray, HashArray]:
        """The same, with what comes before each, as `stored_paths` takes them. O(capacity)."""
        return self._held.paths(tier)

    def new_life(self, incarnation: int) -> None:
        """This source begins anew, and with it the rank: what the others hold is told again.
        O(blocks they hold).
        """
        self._held.clear()
        self._all.journal.new_life(incarnation)
        for other in self._all.sources:
            for tier in Tier:
                self._all.journal.stored_paths(tier, *other.paths(tier))

    def set_doubts(self, doubts: int) -> None:
        """What this source doubts from now on."""
        self._doubts = doubts
        self._all.journal.set_doubts(reduce(or_, (s.state.doubts for s in self._all.sources)))

    def require_checkpoint(self) -> None:
        """The next message must be a checkpoint."""
        self._all.journal.require_checkpoint()

    def _take_back(self, tier: Tier, gone: HashArray) -> None:
        """This source holds these no longer; nor does the rank, unless another source does."""
        for other in self._all.sources:
            if other is not self and len(gone):
                gone = other._held.absent(tier, gone)
        if len(gone):
            self._all.journal.removed(tier, gone)

    def _others_hold(self, tier: Tier | None) -> bool:
        others = (s.state.counts for s in self._all.sources if s is not self)
        return any(any(counts) if tier is None else counts[tier] for counts in others)
