"""One rank of a Dynamo fleet: the order of its events, and their way into its normaliser.

Dynamo's publishers number the events of a rank consecutively, from 0 (1.0.2) or from 1 (1.6.1), and
restart in each life. 1.6.1 also gives the publisher of each life its own id. Nothing can be
replayed, and events published before the subscription are not known.
"""

from math import inf

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from router.discovery.dynamo.fleet.messages import EventMessage, RouterEvent
from router.protocol.values import Identity, Rank, Tier
from router.publisher.engine_events.batch import (
    EngineBatch,
    EngineCleared,
    EnginePart,
    EngineRemoved,
    EngineStored,
)
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.normalizer.settings import EngineSettings, NormalizerLimits
from router.sequence.hashing.keyed_hashes import PLAIN, HashKeying

LIMITS = NormalizerLimits(
    held_back_blocks=65_536, held_back_s=inf, doubt_after_s=2.0, contexts=0, known_blocks=1 << 22
)
"""Orphans wait without a time limit: a parent that is stored again later still resolves them."""

_COUNTED = EngineSettings()
_DEDUPLICATED = EngineSettings(report_mode="deduplicated")

_MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.REMOTE: "REMOTE"}
_NO_TOKENS = np.empty(0, np.uint32)


class EventOrder:
    """The cursor of one rank."""

    __slots__ = ("_last", "_publisher_id", "_sequence")

    def __init__(self) -> None:
        self._last: RouterEvent | None = None
        self._publisher_id: int | None = None
        self._sequence: int | None = None

    def take(self, event: RouterEvent, message: EventMessage) -> tuple[bool, bool] | None:
        """Advance to the next event, received in this message.

        Returns whether it begins a life, and whether events before it are missing. Returns None for
        a duplicate of the last event.
        """
        last, is_same = self._last, message.publisher_id == self._publisher_id
        has_lost_envelopes = self._has_lost_envelopes(message)
        self._last = event
        self._publisher_id, self._sequence = message.publisher_id, message.sequence
        if last is not None and is_same:
            if event == last:
                return None
            skipped = event.event.event_id - last.event.event_id - 1
            if skipped >= 0:
                return False, skipped > 0 or has_lost_envelopes
        return True, event.event.event_id != message.first_event_id

    def _has_lost_envelopes(self, message: EventMessage) -> bool:
        """Return whether envelopes were lost since the last event of this rank."""
        if message.sequence is None or self._sequence is None:
            return False
        return message.sequence > self._sequence + 1


class RankCounts(Struct):
    """Totals over all lives."""

    events: int = 0
    duplicate_events: int = 0
    gaps: int = 0
    """Gaps before a received event, including those at the start of a life."""
    lives: int = 0
    refused_events: int = 0
    passed_over_events: int = 0
    """Events in a tier or residency that counts for no worker."""
    stored_blocks: int = 0
    removed_blocks: int = 0
    unknown_removed_blocks: int = 0
    orphaned_blocks: int = 0
    adopted_blocks: int = 0
    given_up_blocks: int = 0


class DynamoRank:
    """The state of one rank; only its normaliser writes to its journal."""

    __slots__ = ("_counts", "_is_restored", "_normalizer", "_order", "journal", "rank")

    def __init__(
        self,
        rank: Rank,
        incarnation: int,
        identity: Identity,
        multiplier: int,
        naming: HashKeying = PLAIN,
        limits: NormalizerLimits = LIMITS,
    ) -> None:
        self.rank = rank
        self.journal = EventJournal(
            rank, incarnation, identity, multiplier=multiplier, naming=naming
        )
        self._normalizer = Normalizer(self.journal, identity, limits)
        self._order = EventOrder()
        self._counts = RankCounts()
        self._is_restored = False

    @property
    def has_begun(self) -> bool:
        """True once an event of its blocks was received."""
        return self._counts.lives > 0

    @property
    def counts(self) -> RankCounts:
        """The totals. O(1)."""
        blocks = self._normalizer.stats.counts
        unknown = blocks.unknown_removed + blocks.over_removed
        return replace(
            self._counts,
            refused_events=blocks.refused_events,
            stored_blocks=blocks.stored + blocks.resolved,
            removed_blocks=blocks.removed - unknown,
            unknown_removed_blocks=unknown,
            orphaned_blocks=blocks.held_back,
            adopted_blocks=blocks.resolved,
            given_up_blocks=blocks.given_up,
        )

    def take(self, event: RouterEvent, message: EventMessage, now_s: float) -> str | None:
        """Apply the next event; return the reason if it is refused."""
        order = self._order.take(event, message)
        self._counts.events += 1
        if order is None:
            self._counts.duplicate_events += 1
            return None
        begins_life, is_after_gap = order
        continues_snapshot = self._is_restored and is_after_gap and message.counts_copies
        self._is_restored = False
        if begins_life and not continues_snapshot:
            self._begin_life(counts_copies=message.counts_copies)
        if is_after_gap:
            self._counts.gaps += 1
            self._normalizer.note_gap()
        return self._apply(event, now_s)

    def restore(self, event: RouterEvent, now_s: float) -> str | None:
        """Apply a store from a snapshot, before any event; return the reason if it is refused.

        It is not certain that the following events continue where the snapshot ends.
        """
        if not self.has_begun:
            self._begin_life(counts_copies=True)
            self._is_restored = True
            self._normalizer.note_gap()
        return self._apply(event, now_s)

    def tick(self, now_s: float) -> None:
        """Update the published doubts."""
        self._normalizer.tick(now_s)

    def check_invariants(self) -> None:
        """Assert the invariants of the normaliser. O(blocks known)."""
        self._normalizer.check_invariants()

    def _begin_life(self, *, counts_copies: bool) -> None:
        if self.has_begun:
            self.journal.new_life(self.journal.incarnation + 1)
        self._counts.lives += 1
        self._normalizer.reset(_COUNTED if counts_copies else _DEDUPLICATED)

    def _apply(self, event: RouterEvent, now_s: float) -> str | None:
        parts: list[EnginePart] = []
        if event.tier is None:
            self._counts.passed_over_events += 1
        else:
            parts.append(_engine_event(event, event.tier, self.journal.identity.block_size))
        self._normalizer.apply(EngineBatch(None, parts, [], []), now_s)
        return "; ".join(self._normalizer.take_complaints()) or None


def _engine_event(event: RouterEvent, tier: Tier, block_size: int) -> EnginePart:
    data, medium = event.event.data, _MEDIA[tier]
    if data == "cleared":
        return EngineCleared(tier)
    if data.removed is not None:
        return EngineRemoved(np.array(data.removed.block_hashes, np.uint64), medium)
    assert data.stored is not None
    blocks = data.stored.blocks
    return EngineStored(
        np.array([block.block_hash for block in blocks], np.uint64),
        data.stored.parent_hash,
        _NO_TOKENS,
        block_size,
        medium,
        local_hashes=np.array([block.tokens_hash for block in blocks], np.uint64),
    )
