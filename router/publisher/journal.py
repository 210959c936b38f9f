"""What one rank has to say next: the pure half of the event publisher.

Changes are noted as canonical events, coalesced, and taken as one message at a time. A batch
carries everything noted since the last message; a checkpoint carries everything held, and replaces
the log. A checkpoint is due at the start of a life, after anything that may have left a hole in the
log, on request, when the log outgrows what it describes, and when more is noted than one batch may
carry: so nothing ever waits in an unbounded queue, and nothing noted is ever lost.

    stored, removed, cleared ─▶ held ─▶ noted ──take──▶ batch, or checkpoint of what is held
                                          └──seal──▶ recent ─▶ who asks (`local_index.py`)
"""

from collections.abc import Sequence

from msgspec import Struct

from router.protocol.events import (
    REMOVED,
    STORED,
    Checkpoint,
    EventBatch,
    LogMessage,
    pack_state,
)
from router.protocol.values import HashArray, HeldState, Identity, Rank, Tier
from router.publisher.checkpoints import checkpoint_of
from router.publisher.held import DEFAULT_MULTIPLIER, Hashes, HeldBlocks
from router.publisher.noted import NotedEvents
from router.publisher.recent import RecentEvents
from router.sequence.naming import PLAIN, BlockNaming


class JournalLimits(Struct, frozen=True):
    """Bounds. A block takes 8 bytes, so the defaults stay under NATS's 1 MiB a message."""

    event_blocks: int = 512
    batch_events: int = 8_192
    batch_blocks: int = 65_536
    batch_bytes: int = 786_432
    checkpoint_part_blocks: int = 98_304
    tail_blocks: int = 4_096
    """The log is never shortened before it holds this many."""

    recent_events: int = 1_024
    recent_bytes: int = 786_432
    """Of events kept to be told again, all in one message."""


DEFAULT_LIMITS = JournalLimits()


class EventJournal:
    """Events of one rank, life after life (incarnation), ids from 1 in each.

    `multiplier` is odd, and a secret one keeps callers from choosing blocks that slow us down.
    Blocks come here by their bus names: `naming` is for those who know them by public hashes.

    Invariant: the log as taken so far, followed by what is noted, is what is held, unless a
    checkpoint is due.
    """

    __slots__ = (
        "_checkpoint_due",
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
        naming: BlockNaming = PLAIN,
    ) -> None:
        self.naming = naming
        self._rank = rank
        self._identity = identity
        self._limits = limits
        self._held = HeldBlocks(multiplier)
        self._noted = NotedEvents(
            limits.event_blocks, limits.batch_events, limits.batch_blocks, limits.batch_bytes
        )
        self._recent = RecentEvents(limits.recent_events, limits.recent_bytes)
        self._doubts = 0
        self.new_life(incarnation)

    @property
    def incarnation(self) -> int:
        """The present life."""
        return self._incarnation

    @property
    def identity(self) -> Identity:
        """How blocks are named."""
        return self._identity

    @property
    def last_event_id(self) -> int:
        """Id of the last event taken."""
        return self._last_event_id

    @property
    def taken_state(self) -> HeldState:
        """What is held as of the last message taken."""
        return self._taken_state

    @property
    def state(self) -> HeldState:
        """What is held at this moment."""
        return self._held.state(self._doubts)

    @property
    def recent(self) -> RecentEvents:
        """Events whose ids are settled: by `take`, or by `seal`."""
        return self._recent

    @property
    def has_news(self) -> bool:
        """Is there a message to take?"""
        return self._checkpoint_due or bool(self._noted)

    def new_life(self, incarnation: int) -> None:
        """The cache begins anew: nothing is held, ids count from 1, a checkpoint is due."""
        self._incarnation = incarnation
        self._held.clear()
        self._noted.clear()
        self._recent.restart(0)
        self._last_event_id = self._event_id_before_noted = 0
        self._taken_state = HeldState()
        self._tail_blocks = 0
        self._checkpoint_due = True

    def stored(self, tier: Tier, sequence_hashes: Hashes, parent: int | None) -> HashArray:
        """Consecutive blocks, the first after `parent`, are now in this tier; those that were new
        in it.
        """
        new = self._held.store(tier, sequence_hashes, parent)
        self._note(STORED, tier, new)
        return new

    def stored_paths(self, tier: Tier, sequence_hashes: HashArray, heads: HashArray) -> HashArray:
        """The same for several runs of consecutive blocks; `heads`: see `held.path_heads`."""
        new = self._held.store_paths(tier, sequence_hashes, heads)
        self._note(STORED, tier, new)
        return new

    def removed(self, tier: Tier, sequence_hashes: Hashes) -> HashArray:
        """Blocks are no longer in this tier; those that were held in it."""
        gone = self._held.remove(tier, sequence_hashes)
        self._note(REMOVED, tier, gone)
        return gone

    def cleared(self, tier: Tier | None = None) -> None:
        """A tier is empty; None: all are. Where nothing was held, nothing changes."""
        counts = self._held.state().counts
        if not (any(counts) if tier is None else counts[tier]):
            return
        self._held.clear(tier)
        if self._has_room(0):
            self._noted.add_clear(tier)

    @property
    def doubts(self) -> int:
        """The sum of doubts set last."""
        return self._doubts

    def set_doubts(self, doubts: int) -> None:
        """A sum of `Doubt`s, part of every state from now on. No event, and no news by itself."""
        self._doubts = doubts

    def require_checkpoint(self) -> None:
        """The next message must be a checkpoint."""
        self._checkpoint_due = True

    def seal(self) -> None:
        """Settle what is noted: its events keep their ids, and nothing is added to them."""
        for event in self._noted.seal():
            self._recent.append(event)

    def take(self) -> Sequence[LogMessage]:
        """The next message, or the parts of one; whoever takes it must deliver it or require a
        checkpoint. What is noted becomes part of the log.
        """
        if self._checkpoint_is_due():
            return self._take_checkpoint()
        return [self._take_batch()] if self._noted else []

    def dump(self) -> Sequence[Checkpoint]:
        """Everything held at this moment, in the form of a checkpoint; not part of the log."""
        self.seal()
        return self._checkpoint(self._event_id_before_noted + len(self._noted), self.state)

    def held(self, tier: Tier) -> HashArray:
        """Every block held in this tier, in no order."""
        return self._held.held(tier)

    def _note(self, kind: int, tier: Tier, changed: HashArray) -> None:
        if len(changed) and self._has_room(len(changed)):
            self._noted.add(kind, tier, changed)

    def _has_room(self, block_count: int) -> bool:
        """Is there room for a change? If not, a checkpoint has to say it, and all before it."""
        if self._noted.has_room(block_count):
            return True
        self._overflow()
        return False

    def _overflow(self) -> None:
        """What is not noted gets an id too: no two states are ever known by the same one."""
        self._event_id_before_noted += len(self._noted) + 1
        self._noted.clear()
        self._recent.restart(self._event_id_before_noted)
        self._checkpoint_due = True

    def _checkpoint_is_due(self) -> bool:
        tail_blocks = self._tail_blocks + self._noted.block_count
        return self._checkpoint_due or tail_blocks > max(
            self._held.block_count, self._limits.tail_blocks
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
        return checkpoint_of(
            self._held,
            self._rank,
            self._incarnation,
            self._identity,
            event_id,
            state,
            self._limits.checkpoint_part_blocks,
        )
