"""One rank of a Dynamo worker: its events ─▶ the journal that all ranks of this router are told by.

    RouterEvent ─▶ EventOrder  its turn? the same life?
                ─▶ BlockNames  block_hash ─▶ sequence hash, from tokens_hash and the parent's
                    └ Orphans  children that came before their parents
                ─▶ EventJournal ─▶ batches and checkpoints for the index, with counts and digests

1.0.2 passes on what engines say: one store and one removal for each copy of a block, so copies are
counted. 1.6.1 counts them itself, and passes on every store but only the last removal: there one
removal ends a block however often it was stored. What cannot be told exactly is a doubt.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from router.dynamo.block_names import BlockNames, names_behind
from router.dynamo.messages import Change, EventMessage, RouterEvent, StoredBlock, StoredBlocks
from router.dynamo.order import EventOrder, Turn
from router.dynamo.orphans import Orphans
from router.protocol.values import Doubt, HashArray, Identity, Rank, Tier
from router.publisher.counted_journal import CountedJournal
from router.publisher.held import path_heads
from router.publisher.journal import EventJournal
from router.sequence.hashing import chain_hash
from router.sequence.naming import PLAIN, BlockNaming

# Plain integers: a flag of an enum takes a microsecond to combine.
_LOST = int(Doubt.EVENTS_LOST)
_ORPHANS = int(Doubt.ORPHANS)
_LOWER_TIERS = int(Doubt.LOWER_TIERS)
_UNREADABLE = int(Doubt.UNREADABLE)

_Known: TypeAlias = tuple[Tier, Sequence[StoredBlock], int | None]


class RankLimits(Struct, frozen=True):
    """Bounds on what one rank can make us keep, in blocks."""

    held_blocks: int = 1 << 22
    past_blocks: int = 65_536
    orphan_blocks: int = 65_536
    orphan_wait_s: float = 2.0


class RankCounts(Struct):
    """What happened, in totals over all lives."""

    events: int = 0
    duplicate_events: int = 0
    gaps: int = 0
    """Events missing before one that came: those that a life began with included."""
    lives: int = 0
    refused_events: int = 0
    passed_over_events: int = 0
    """In a tier or residency that no worker is credited for."""
    stored_blocks: int = 0
    removed_blocks: int = 0
    unknown_removed_blocks: int = 0
    orphaned_blocks: int = 0
    adopted_blocks: int = 0
    given_up_blocks: int = 0


class DynamoRank:
    """State of one rank; its journal is to be read by others, and written by nobody else.

    Invariant: the journal holds exactly the names that `BlockNames` holds, by tier.
    """

    __slots__ = (
        "_counted",
        "_counts_copies",
        "_doubts",
        "_limits",
        "_names",
        "_order",
        "_orphans",
        "counts",
        "journal",
        "rank",
    )

    def __init__(
        self,
        rank: Rank,
        incarnation: int,
        identity: Identity,
        limits: RankLimits,
        multiplier: int,
        naming: BlockNaming = PLAIN,
    ) -> None:
        self.rank = rank
        self.journal = EventJournal(
            rank, incarnation, identity, multiplier=multiplier, naming=naming
        )
        self.counts = RankCounts()
        self._limits = limits
        self._order = EventOrder()
        self._counts_copies = False
        self._begin()

    def _begin(self) -> None:
        self._counted = CountedJournal(self.journal)
        self._names = BlockNames(self._limits.past_blocks)
        self._orphans = Orphans(self._limits.orphan_blocks, self._limits.orphan_wait_s)
        self._doubts = 0

    @property
    def has_begun(self) -> bool:
        """Whether anything was heard of its blocks."""
        return self.counts.lives > 0

    def take(self, event: RouterEvent, message: EventMessage, now_s: float) -> str | None:
        """Take an event in its turn; a sentence if it is refused."""
        turn = self._order.take(event, message)
        self.counts.events += 1
        if turn is Turn.DUPLICATE:
            self.counts.duplicate_events += 1
            return None
        if turn is not Turn.NEXT:
            self._note_turn(turn)
        self._counts_copies = message.counts_copies
        return self._apply(event, now_s)

    def restore(self, event: RouterEvent, now_s: float) -> str | None:
        """Take a store that a snapshot tells of, before any event; a sentence if it is refused.

        Nothing proves that the events which follow go on where the snapshot ends.
        """
        if not self.has_begun:
            self._new_life()
            self._doubts |= _LOST
        return self._apply(event, now_s)

    def tick(self, now_s: float) -> None:
        """Say what is doubted as of now."""
        if self._doubts & _LOWER_TIERS and not self._names.held_lower_blocks:
            self._doubts &= ~_LOWER_TIERS
        orphans = _ORPHANS if self._orphans.are_overdue(now_s) else 0
        self.journal.set_doubts(self._doubts | orphans)

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring. O(blocks held)."""
        for tier in Tier:
            names = map(self.journal.naming.name, self._names.names(tier))
            assert set(self.journal.held(tier).tolist()) == set(names)
        self._orphans.check_invariants()

    def _note_turn(self, turn: Turn) -> None:
        """What came before is of another life, or not all of it was heard."""
        is_known = turn is Turn.JOINED_LATE and self.has_begun  # from a snapshot
        if turn in (Turn.FIRST_OF_LIFE, Turn.LATE_IN_LIFE, Turn.JOINED_LATE) and not is_known:
            self._new_life()
        if turn is not Turn.FIRST_OF_LIFE:
            self.counts.gaps += 1
            self._doubts |= _LOST

    def _new_life(self) -> None:
        if self.has_begun:
            self.journal.new_life(self.journal.incarnation + 1)
        self.counts.lives += 1
        self._begin()

    def _apply(self, event: RouterEvent, now_s: float) -> str | None:
        data, tier = event.event.data, event.tier
        refusal = None
        if tier is None:
            self.counts.passed_over_events += 1
        elif data == "cleared":
            self._clear(tier)
        elif isinstance(data, Change) and data.stored is not None:
            refusal = self._store(tier, data.stored, now_s)
        elif isinstance(data, Change) and data.removed is not None:
            self._remove(tier, data.removed.block_hashes)
        if refusal is not None:
            self.counts.refused_events += 1
            self._doubts |= _UNREADABLE
        self.tick(now_s)
        return refusal

    def _store(self, tier: Tier, stored: StoredBlocks, now_s: float) -> str | None:
        blocks, parent = stored.blocks, stored.parent_hash
        hashes = [block.block_hash for block in blocks]
        distinct = {*hashes, parent}
        if len(distinct) <= len(hashes):
            return "a block hash twice in one event"
        if self._names.held_blocks + len(blocks) > self._limits.held_blocks:
            return f"more than {self._limits.held_blocks} blocks held"
        if not blocks:
            return None
        name = None if parent is None else self._names.find(parent)
        if parent is not None and name is None:
            self._orphan(tier, blocks, parent, now_s)
        else:
            self._name(tier, blocks, name)
        return None

    def _orphan(self, tier: Tier, blocks: Sequence[StoredBlock], parent: int, now_s: float) -> None:
        self.counts.orphaned_blocks += len(blocks)
        given_up = self._orphans.add(tier, blocks, parent, now_s)
        self.counts.given_up_blocks += given_up
        if given_up:
            self._doubts |= _ORPHANS

    def _name(self, tier: Tier, blocks: Sequence[StoredBlock], parent: int | None) -> None:
        """Blocks behind a known parent are in a tier; so may be others that waited for them."""
        known = [(tier, blocks, parent)]
        while known:
            tier, blocks, parent = known.pop()
            hashes = [block.block_hash for block in blocks]
            names = names_behind(parent, [block.tokens_hash for block in blocks])
            chained = [parent, *names.tolist()]
            self._forget_others(hashes, chained[1:])
            self._put(tier, hashes, names, parent)
            for block, before, name in zip(blocks, chained, chained[1:], strict=False):
                known += self._adopted(block, name, before)

    def _put(self, tier: Tier, hashes: Sequence[int], names: HashArray, parent: int | None) -> None:
        self.counts.stored_blocks += len(hashes)
        counts_copies = self._counts_copies
        new = self._names.put(tier, hashes, names.tolist(), counts_copies=counts_copies)
        heads = path_heads([len(hashes)], [parent])
        self._counted.stored(tier, names, heads, np.array(new, np.uint64))

    def _adopted(self, block: StoredBlock, name: int, parent: int | None) -> Iterator[_Known]:
        """What is known too, now that this block is: its own copies elsewhere, and its children."""
        if not len(self._orphans):
            return
        itself = self._orphans.take(block)
        if itself is not None:
            yield from ((tier, [block], parent) for tier in itself.held_tiers)
        for child in self._orphans.adopt(block.block_hash):
            self.counts.adopted_blocks += 1
            yield from ((tier, [child.block], name) for tier in child.held_tiers)
            if not child.tiers:
                child_name = chain_hash(name, child.block.tokens_hash)
                self._names.remember(child.block.block_hash, child_name)
                yield from self._adopted(child.block, child_name, name)

    def _forget_others(self, hashes: Sequence[int], names: Sequence[int | None]) -> None:
        """An engine hash that names another block than before: that one is gone."""
        for block_hash, name in zip(hashes, names, strict=True):
            known = self._names.find(block_hash)
            if known is not None and known != name:
                for tier, gone in self._names.forget(block_hash):
                    self._counted.removed(tier, np.array([gone], np.uint64))

    def _remove(self, tier: Tier, hashes: Sequence[int]) -> None:
        gone, unknown = self._names.drop(tier, hashes)
        if gone:
            self._counted.removed(tier, np.array(gone, np.uint64))
        orphans = sum(self._orphans.drop(tier, each) for each in unknown)
        self.counts.removed_blocks += len(gone) + orphans
        self.counts.unknown_removed_blocks += len(unknown) - orphans

    def _clear(self, tier: Tier) -> None:
        """Of lower tiers nothing is said where the device alone is cleared."""
        self._names.clear(tier)
        self._orphans.clear(tier)
        self._counted.cleared(tier)
        if not self._names.held_blocks and not len(self._orphans):
            self._doubts = 0
        elif tier is Tier.DEVICE:
            self._doubts |= _LOWER_TIERS
