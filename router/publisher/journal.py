"""What one rank has to say next: the pure half of the event publisher.

Changes are noted as canonical events, coalesced, and taken as one message at a time. A batch
carries everything noted since the last message; a checkpoint carries everything held, and replaces
the log. A checkpoint is due at the start of a life, after anything that may have left a hole in the
log, on request, when the log outgrows what it describes, and when more is noted than one batch may
carry: so nothing ever waits in an unbounded queue, and nothing noted is ever lost.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from router.protocol.events import (
    Checkpoint,
    Cleared,
    EventBatch,
    LogMessage,
    Removed,
    Stored,
    TierBlocks,
    pack_batch,
)
from router.protocol.values import HashArray, HeldState, Identity, Rank, Tier, pack_hashes
from router.publisher.held import HeldBlocks


class JournalLimits(Struct, frozen=True):
    """Bounds. A block takes 8 bytes, so the defaults stay under NATS's 1 MiB a message."""

    event_blocks: int = 512
    batch_events: int = 8_192
    batch_blocks: int = 65_536
    checkpoint_part_blocks: int = 98_304
    tail_blocks: int = 4_096
    """The log is never shortened before it holds this many."""


DEFAULT_LIMITS = JournalLimits()


class _Noted:
    """An event in the making."""

    __slots__ = ("hashes", "kind", "tier")

    def __init__(self, kind: type[Stored | Removed], tier: Tier) -> None:
        self.kind = kind
        self.tier = tier
        self.hashes: list[int] = []

    def event(self) -> Stored | Removed:
        return self.kind(self.tier, pack_hashes(np.array(self.hashes, dtype=np.uint64)))


class EventJournal:
    """Events of one rank in one incarnation, ids from 1.

    Invariant: the log as taken so far, followed by what is noted, is what is held.
    """

    __slots__ = (
        "_checkpoint_due",
        "_held",
        "_identity",
        "_incarnation",
        "_last_event_id",
        "_limits",
        "_noted",
        "_noted_blocks",
        "_rank",
        "_tail_blocks",
        "_taken_state",
    )

    def __init__(
        self,
        rank: Rank,
        incarnation: int,
        identity: Identity,
        limits: JournalLimits = DEFAULT_LIMITS,
    ) -> None:
        self._rank = rank
        self._incarnation = incarnation
        self._identity = identity
        self._limits = limits
        self._held = HeldBlocks()
        self._noted: list[_Noted | Cleared] = []
        self._noted_blocks = 0
        self._last_event_id = 0
        self._tail_blocks = 0
        self._taken_state = HeldState()
        self._checkpoint_due = True

    @property
    def last_event_id(self) -> int:
        """Id of the last event taken."""
        return self._last_event_id

    @property
    def taken_state(self) -> HeldState:
        """What is held as of the last message taken."""
        return self._taken_state

    @property
    def has_news(self) -> bool:
        """Is there a message to take?"""
        return self._checkpoint_due or bool(self._noted)

    def stored(self, tier: Tier, sequence_hashes: Sequence[int], parent: int | None) -> None:
        """Consecutive blocks, the first after `parent`, are now in this tier."""
        self._note(Stored, tier, self._held.store(tier, sequence_hashes, parent))

    def removed(self, tier: Tier, sequence_hashes: Sequence[int]) -> None:
        """Blocks are no longer in this tier."""
        self._note(Removed, tier, self._held.remove(tier, sequence_hashes))

    def cleared(self, tier: Tier | None = None) -> None:
        """A tier is empty; None: all are."""
        self._held.clear(tier)
        if tier is None:
            self._noted, self._noted_blocks = [], 0
        if not self._is_overfull():
            self._noted.append(Cleared(tier))

    def require_checkpoint(self) -> None:
        """The next message must be a checkpoint."""
        self._checkpoint_due = True

    def take(self) -> Sequence[LogMessage]:
        """The next message, or the parts of one; whoever takes it must deliver it or require a
        checkpoint. What is noted becomes part of the log.
        """
        if self._checkpoint_is_due():
            return self._take_checkpoint()
        return [self._take_batch()] if self._noted else []

    def held(self, tier: Tier) -> HashArray:
        """Every block held in this tier."""
        return self._held.held(tier)

    def _note(self, kind: type[Stored | Removed], tier: Tier, changed: list[int]) -> None:
        if self._is_overfull():
            return
        self._noted_blocks += len(changed)
        for sequence_hash in changed:
            self._noted_event(kind, tier).hashes.append(sequence_hash)

    def _is_overfull(self) -> bool:
        """More is noted than a batch may carry, so a checkpoint has to say it."""
        limits = self._limits
        return self._noted_blocks > limits.batch_blocks or len(self._noted) > limits.batch_events

    def _noted_event(self, kind: type[Stored | Removed], tier: Tier) -> _Noted:
        last = self._noted[-1] if self._noted else None
        if (
            isinstance(last, _Noted)
            and (last.kind, last.tier) == (kind, tier)
            and len(last.hashes) < self._limits.event_blocks
        ):
            return last
        event = _Noted(kind, tier)
        self._noted.append(event)
        return event

    def _checkpoint_is_due(self) -> bool:
        tail_blocks = self._tail_blocks + self._noted_blocks
        return (
            self._checkpoint_due
            or self._is_overfull()
            or tail_blocks > max(self._held.block_count, self._limits.tail_blocks)
        )

    def _take_batch(self) -> EventBatch:
        events = [n if isinstance(n, Cleared) else n.event() for n in self._noted]
        batch = EventBatch(
            self._rank.worker_id,
            self._rank.dp_rank,
            self._incarnation,
            self._identity,
            self._last_event_id + 1,
            self._last_event_id + len(events),
            pack_batch(self._held.state(), events),
        )
        self._tail_blocks += self._noted_blocks
        self._log_noted()
        return batch

    def _take_checkpoint(self) -> list[Checkpoint]:
        self._log_noted()
        self._tail_blocks = 0
        self._checkpoint_due = False
        parts = self._parts()
        return [
            Checkpoint(
                self._rank.worker_id,
                self._rank.dp_rank,
                self._incarnation,
                self._identity,
                self._last_event_id,
                part,
                len(parts),
                blocks,
                self._taken_state,
            )
            for part, blocks in enumerate(parts)
        ]

    def _log_noted(self) -> None:
        self._last_event_id += len(self._noted)
        self._noted = []
        self._noted_blocks = 0
        self._taken_state = self._held.state()

    def _parts(self) -> list[tuple[TierBlocks, ...]]:
        size = self._limits.checkpoint_part_blocks
        parts: list[list[TierBlocks]] = [[]]
        room = size
        for tier in Tier:
            hashes = self._held.held(tier)
            while len(hashes):
                if not room:
                    parts.append([])
                    room = size
                parts[-1].append(TierBlocks(tier, pack_hashes(hashes[:room])))
                hashes, room = hashes[room:], room - len(hashes[:room])
        return [tuple(part) for part in parts]
