"""The messages that one rank publishes next: the part of the event publisher without I/O.

Changes are recorded as canonical events, merged, and taken as one message at a time. A batch
contains all events since the last message; a checkpoint contains all held blocks, and replaces the
log. A checkpoint is due at the start of a life, after anything that may have left a hole in the
log, on request, when the log outgrows the blocks it describes, and when there are more events than
one batch may contain: so no queue is unbounded, and no recorded change is lost.

    stored, removed, cleared ─▶ held ─▶ noted ──take──▶ batch, or checkpoint of the held blocks
                                          └──seal──▶ recent ─▶ range queries (`rank_queries.py`)
"""

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from router.protocol.events import (
    REMOVED,
    STORED,
    Checkpoint,
    ClassBlocks,
    EventBatch,
    LogMessage,
    TierBlocks,
    pack_state,
)
from router.protocol.hybrid import HybridState, Layout
from router.protocol.values import TIERS, HashArray, HeldState, Identity, Rank, Tier, pack_hashes
from router.publisher.journal.event_buffer import EventBuffer, ReplayRing
from router.publisher.journal.held_blocks import DEFAULT_MULTIPLIER, Hashes, HeldBlocks
from router.publisher.journal.held_classes import HeldClasses
from router.sequence.hashing.keyed_hashes import PLAIN, HashKeying

_Part: TypeAlias = tuple[list[TierBlocks], list[ClassBlocks]]


def _parts(held: HeldBlocks, classes: HeldClasses, part_blocks: int) -> list[_Part]:
    """Return all held blocks, in parts of at most `part_blocks`, of which there is at least one."""
    parts: list[_Part] = [([], [])]
    room = part_blocks
    places: list[tuple[int, HashArray]] = [(tier, held.held(tier)) for tier in Tier]
    places += [(TIERS + index, classes.held(index)) for index in classes.indexes]
    for place, hashes in places:
        while len(hashes):
            if not room:
                parts.append(([], []))
                room = part_blocks
            packed = pack_hashes(hashes[:room])
            if place < TIERS:
                parts[-1][0].append(TierBlocks(Tier(place), packed))
            else:
                parts[-1][1].append(ClassBlocks(place - TIERS, packed))
            hashes, room = hashes[room:], room - len(hashes[:room])
    return parts


class JournalLimits(Struct, frozen=True):
    """Limits of messages. A block takes 8 bytes: the defaults stay below NATS's 1 MiB a message."""

    event_blocks: int = 512
    batch_events: int = 8_192
    batch_blocks: int = 65_536
    batch_bytes: int = 786_432
    checkpoint_part_blocks: int = 98_304
    tail_blocks: int = 4_096
    """The log is not shortened before it contains this number of blocks."""

    recent_events: int = 1_024
    recent_bytes: int = 786_432
    """The limit of sealed events kept for range queries, all in one message."""


DEFAULT_LIMITS = JournalLimits()


class EventJournal:
    """The events of one rank, life after life (incarnation), with ids from 1 in each life.

    `multiplier` is odd; a secret one keeps callers from choosing blocks that collide. Blocks are
    given by their bus names; `naming` converts public hashes.

    Invariant: the log taken so far, followed by the recorded events, yields the held blocks, unless
    a checkpoint is due.
    """

    __slots__ = (
        "_checkpoint_due",
        "_classes",
        "_doubts",
        "_event_id_before_noted",
        "_held",
        "_identity",
        "_incarnation",
        "_last_event_id",
        "_limits",
        "_noted",
        "_rank",
        "_recent",
        "_tail_blocks",
        "_taken_state",
        "naming",
    )

    def __init__(
        self,
        rank: Rank,
        incarnation: int,
        identity: Identity,
        limits: JournalLimits = DEFAULT_LIMITS,
        multiplier: int = DEFAULT_MULTIPLIER,
        naming: HashKeying = PLAIN,
    ) -> None:
        self.naming = naming
        self._rank = rank
        self._identity = identity
        self._limits = limits
        self._held = HeldBlocks(multiplier)
        self._classes = HeldClasses(multiplier)
        self._noted = EventBuffer(
            limits.event_blocks, limits.batch_events, limits.batch_blocks, limits.batch_bytes
        )
        self._recent = ReplayRing(limits.recent_events, limits.recent_bytes)
        self._doubts = 0
        self.new_life(incarnation)

    @property
    def incarnation(self) -> int:
        """The current life."""
        return self._incarnation

    @property
    def identity(self) -> Identity:
        """The parameters that determine block hashes."""
        return self._identity

    @property
    def last_event_id(self) -> int:
        """The id of the last event taken."""
        return self._last_event_id

    @property
    def taken_state(self) -> HeldState:
        """The digest of the held blocks as of the last message taken."""
        return self._taken_state

    @property
    def state(self) -> HeldState:
        """The current digest of the held blocks."""
        return self._held.state(self._doubts)

    @property
    def recent(self) -> ReplayRing:
        """The events with final ids, from `take` or `seal`."""
        return self._recent

    def check_invariants(self) -> None:
        """Assert the invariants of the held blocks. O(everything)."""
        self._held.check_invariants()

    @property
    def has_news(self) -> bool:
        """True if there is a message to take."""
        return self._checkpoint_due or bool(self._noted)

    def new_life(self, incarnation: int, *, keeps_classes: bool = False) -> None:
        """Start a new life: without blocks, with ids from 1, and with a checkpoint due.

        `keeps_classes`: the layout and the blocks of classes stay; they are in the checkpoint.
        """
        self._incarnation = incarnation
        self._held.clear()
        if not keeps_classes:
            self._classes = HeldClasses(self._classes.multiplier)
        self._noted.clear()
        self._recent.restart(0)
        self._last_event_id = self._event_id_before_noted = 0
        self._taken_state = HeldState()
        self._tail_blocks = 0
        self._checkpoint_due = True

    def stored(self, tier: Tier, sequence_hashes: Hashes, parent: int | None) -> HashArray:
        """Store consecutive blocks, the first after `parent`, in a tier. Returns the new ones."""
        new = self._held.store(tier, sequence_hashes, parent)
        self._note(STORED, tier, new)
        return new

    def stored_paths(self, tier: Tier, sequence_hashes: HashArray, heads: HashArray) -> HashArray:
        """Store several runs of consecutive blocks; `heads`: see `held.path_heads`.

        Returns the blocks that were new in the tier.
        """
        new = self._held.store_paths(tier, sequence_hashes, heads)
        self._note(STORED, tier, new)
        return new

    def removed(self, tier: Tier, sequence_hashes: Hashes) -> HashArray:
        """Remove blocks from a tier. Returns those that were held in it."""
        gone = self._held.remove(tier, sequence_hashes)
        self._note(REMOVED, tier, gone)
        return gone

    def cleared(self, tier: Tier | None = None) -> None:
        """Remove everything from a tier, or from all if it is None; no event if it was empty.

        Classes keep their blocks; an event that clears all tiers would clear them too.
        """
        counts = self._held.state().counts
        if not (any(counts) if tier is None else counts[tier]):
            return
        if tier is None and self._classes.block_count:
            for each in Tier:
                self.cleared(each)
            return
        self._held.clear(tier)
        if self._has_room(0):
            self._noted.add_clear(tier)

    def set_layout(self, layout: Layout | None) -> None:
        """Set the layout of a hybrid model, part of every message from now on.

        None: the model is not hybrid. Classes that have changed must be empty. If some are gone, a
        checkpoint becomes due: the recorded events may be of classes that the layout lacks.
        """
        if layout != self._classes.layout:
            before = len(self._classes.indexes)
            self._classes.layout = layout
            if len(self._classes.indexes) < before and self._noted:
                self._overflow()
            if not self._noted and self._has_room(0):
                self._noted.add_nothing()

    def class_stored(self, index: int, names: HashArray) -> None:
        """Store blocks in a class of the layout; those that it holds are ignored."""
        self._note(STORED, TIERS + index, self._classes.store(index, names))

    def class_removed(self, index: int, names: HashArray) -> None:
        """Remove blocks from a class; those that it does not hold are ignored."""
        self._note(REMOVED, TIERS + index, self._classes.remove(index, names))

    def classes_cleared(self) -> None:
        """Remove all blocks from all classes."""
        for index in self._classes.clear():
            if self._has_room(0):
                self._noted.add_clear(TIERS + index)

    def held_in_class(self, index: int) -> HashArray:
        """Return all blocks that a class holds, unordered."""
        return self._classes.held(index)

    @property
    def hybrid(self) -> HybridState | None:
        """The layout of a hybrid model, with count and digest of each class; None for others."""
        return self._classes.state

    @property
    def doubts(self) -> int:
        """The sum of doubts set last."""
        return self._doubts

    def set_doubts(self, doubts: int) -> None:
        """Set the sum of `Doubt`s, part of every state from now on. It causes no event."""
        self._doubts = doubts

    def require_checkpoint(self) -> None:
        """Make the next message a checkpoint."""
        self._checkpoint_due = True

    def seal(self) -> None:
        """Make recorded events final: they keep their ids, and later changes do not join them."""
        for event in self._noted.seal():
            self._recent.append(event)

    def take(self) -> Sequence[LogMessage]:
        """Take the next message, or the parts of one; the recorded events become part of the log.

        The caller must deliver it or require a checkpoint.
        """
        if self._checkpoint_is_due():
            return self._take_checkpoint()
        return [self._take_batch()] if self._noted else []

    def dump(self) -> Sequence[Checkpoint]:
        """Return all held blocks in the form of a checkpoint, which is not part of the log."""
        self.seal()
        return self._checkpoint(self._event_id_before_noted + len(self._noted), self.state)

    def held(self, tier: Tier) -> HashArray:
        """Return all blocks held in a tier, unordered."""
        return self._held.held(tier)

    def _note(self, kind: int, place: int, changed: HashArray) -> None:
        """Record a change of a tier, or of class `place` − TIERS."""
        if len(changed) and self._has_room(len(changed)):
            self._noted.add(kind, place, changed)

    def _has_room(self, block_count: int) -> bool:
        """Return whether there is room for a change; otherwise a checkpoint becomes due."""
        if self._noted.has_room(block_count):
            return True
        self._overflow()
        return False

    def _overflow(self) -> None:
        """Drop recorded events. The omitted change gets an id too: no two states share one."""
        self._event_id_before_noted += len(self._noted) + 1
        self._noted.clear()
        self._recent.restart(self._event_id_before_noted)
        self._checkpoint_due = True

    def _checkpoint_is_due(self) -> bool:
        tail_blocks = self._tail_blocks + self._noted.block_count
        return self._checkpoint_due or tail_blocks > max(
            self._held.block_count + self._classes.block_count, self._limits.tail_blocks
        )

    def _take_batch(self) -> EventBatch:
        packed = pack_state(self.state) + self._noted.packed
        first_event_id = self._last_event_id + 1
        self._tail_blocks += self._noted.block_count
        self._log_noted()
        return EventBatch(
            self._rank.worker_id,
            self._rank.dp_rank,
            self._incarnation,
            self._identity,
            first_event_id,
            self._last_event_id,
            packed,
            self.hybrid,
        )

    def _take_checkpoint(self) -> list[Checkpoint]:
        self._log_noted()
        self._tail_blocks = 0
        self._checkpoint_due = False
        return self._checkpoint(self._last_event_id, self._taken_state)

    def _log_noted(self) -> None:
        self.seal()
        self._event_id_before_noted += len(self._noted)
        self._last_event_id = self._event_id_before_noted
        self._noted.clear()
        self._taken_state = self.state

    def _checkpoint(self, event_id: int, state: HeldState) -> list[Checkpoint]:
        """Return the held blocks after event `event_id`, in parts. O(capacity of what is held)."""
        parts = _parts(self._held, self._classes, self._limits.checkpoint_part_blocks)
        hybrid = self.hybrid
        return [
            Checkpoint(
                self._rank.worker_id,
                self._rank.dp_rank,
                self._incarnation,
                self._identity,
                event_id,
                part,
                len(parts),
                tuple(blocks),
                state,
                hybrid,
                tuple(class_blocks),
            )
            for part, (blocks, class_blocks) in enumerate(parts)
        ]
