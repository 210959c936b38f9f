"""The index of every scope, and how far each rank in it can be believed.

A message reaches the index only if its rank's event log says so; after it the index must equal what
the message says the rank holds, in count and digest, or the rank is broken until a checkpoint heals
it.
"""

from collections.abc import Callable, Iterator

from msgspec import Struct

from router.indexer.base import HeldSummary, Indexer, OverlapScores
from router.indexer.event_log import EventLog, Verdict
from router.protocol.events import Cleared, Event, EventBatch, LogMessage, Removed, Stored
from router.protocol.loads import LoadReport
from router.protocol.replies import Trust, TrustState
from router.protocol.values import (
    SCHEME,
    HashArray,
    HeldState,
    Identity,
    Rank,
    Scope,
    Tier,
    unpack_hashes,
)

CHECKPOINT_WAIT_S = 1.0
"""How long a doubt waits to be healed by the log itself before a checkpoint is asked for."""

CHECKPOINT_RETRY_S = 2.0
"""How long an asked-for checkpoint may take before it is asked for again."""


class _RankIndex:
    """One rank's place in the index."""

    __slots__ = ("asked_s", "identity", "log", "reported_event_id", "scope")

    def __init__(self, scope: Scope, identity: Identity, now_s: float) -> None:
        self.scope = scope
        self.identity = identity
        self.log = EventLog(now_s)
        self.reported_event_id = 0
        self.asked_s = float("-inf")


class RankBlocks(Struct, frozen=True):
    """Blocks of one rank in one tier, for dumps."""

    rank: Rank
    tier: Tier
    event_id: int
    sequence_hashes: HashArray


class TrustedIndex:
    """One `Indexer` per scope and one event log per rank.

    Invariant: a rank holds blocks only in the index of its own scope, and only if it was added.
    """

    __slots__ = ("_indexers", "_make_indexer", "_ranks")

    def __init__(self, make_indexer: Callable[[], Indexer]) -> None:
        self._make_indexer = make_indexer
        self._indexers: dict[Scope, Indexer] = {}
        self._ranks: dict[Rank, _RankIndex] = {}

    def add_rank(self, rank: Rank, scope: Scope, identity: Identity, now_s: float) -> None:
        """Start an empty, blind rank, in place of what was known under this name."""
        self.drop_rank(rank)
        self._ranks[rank] = _RankIndex(scope, identity, now_s)

    def drop_rank(self, rank: Rank) -> None:
        """Forget a rank and all its blocks; unknown ones are passed over."""
        place = self._ranks.pop(rank, None)
        if place is None:
            return
        self._indexer(place.scope).clear(rank)
        if all(other.scope != place.scope for other in self._ranks.values()):
            del self._indexers[place.scope]

    def incarnation(self, rank: Rank) -> int | None:
        """Which life of the rank the index shows; None while blind, or unknown."""
        place = self._ranks.get(rank)
        return None if place is None else place.log.incarnation

    def apply(self, message: LogMessage, now_s: float) -> Verdict | None:
        """Apply a message of the log; None if its rank is unknown. O(blocks named)."""
        place = self._ranks.get(message.rank)
        if place is None:
            return None
        if message.identity != place.identity or message.identity.scheme != SCHEME:
            place.log.break_off("events of another identity than announced", now_s)
            return Verdict.FOREIGN
        verdict = place.log.classify(message)
        if verdict is Verdict.GAP:
            place.log.break_off(place.log.broken_reason or "events missing", now_s)
        elif verdict in (Verdict.APPLY, Verdict.NEW_LIFE):
            self._apply(place, message, now_s)
        return verdict

    def compare(self, report: LoadReport, now_s: float) -> None:
        """Hold a load report against the index: is it behind, does it differ at equal event id?"""
        place = self._ranks[report.rank]
        log = place.log
        if report.incarnation != log.incarnation:
            log.doubt(now_s)
            return
        place.reported_event_id = report.event_id
        if report.event_id > log.cursor:
            log.doubt(now_s)
        elif report.event_id == log.cursor and log.broken_reason is None:
            log.doubt_since_s = None
            self._verify(place, report.rank, report.state, now_s)

    def stream_lost(self, now_s: float) -> None:
        """The stream was wiped: whatever follows does not continue what was read."""
        for place in self._ranks.values():
            place.log.break_off("event stream lost", now_s)

    def take_wanted_checkpoints(self, now_s: float) -> list[tuple[Rank, str]]:
        """Ranks whose doubt has lasted, and why; each is named at most once per retry time."""
        wanted = []
        for rank, place in self._ranks.items():
            since = place.log.doubt_since_s
            waited = since is not None and now_s - since >= CHECKPOINT_WAIT_S
            if waited and now_s - place.asked_s >= CHECKPOINT_RETRY_S:
                place.asked_s = now_s
                wanted.append((rank, place.log.broken_reason or "behind its reports"))
        return wanted

    def trust(self, rank: Rank, now_s: float) -> Trust:
        """How far this rank's overlap can be believed."""
        place = self._ranks[rank]
        log = place.log
        age_s = None if log.updated_s is None else round(now_s - log.updated_s, 3)
        if place.identity.scheme != SCHEME:
            reason = f"hash scheme {place.identity.scheme!r} is not {SCHEME!r}"
            return Trust(TrustState.BLIND, log.cursor, age_s, reason)
        if log.broken_reason is not None:
            state = TrustState.BLIND if log.is_blind else TrustState.DEGRADED
            return Trust(state, log.cursor, age_s, log.broken_reason)
        behind = place.reported_event_id - log.cursor
        if behind > 0:
            return Trust(TrustState.LAGGING, log.cursor, age_s, f"{behind} events behind")
        return Trust(TrustState.EXACT, log.cursor, age_s)

    def find_matches(self, scope: Scope, sequence_hashes: HashArray) -> OverlapScores:
        """The longest held prefix, per rank of the scope."""
        indexer = self._indexers.get(scope)
        return {} if indexer is None else indexer.find_matches(sequence_hashes)

    def held_blocks(self, rank: Rank) -> int:
        """Blocks the rank holds, counted once per tier. O(1)."""
        return sum(self._summary(rank).counts)

    def block_counts(self) -> dict[Scope, int]:
        """Distinct blocks per scope."""
        return {scope: indexer.block_count() for scope, indexer in self._indexers.items()}

    def dump(self) -> Iterator[tuple[Scope, RankBlocks]]:
        """Everything held, by rank and tier."""
        for rank, place in sorted(self._ranks.items()):
            for tier in Tier:
                held = self._indexer(place.scope).held(rank, tier)
                if len(held):
                    yield place.scope, RankBlocks(rank, tier, place.log.cursor, held)

    def _apply(self, place: _RankIndex, message: LogMessage, now_s: float) -> None:
        indexer = self._indexer(place.scope)
        if isinstance(message, EventBatch):
            for event in place.log.unseen_events(message):
                _apply_event(indexer, message.rank, event)
        else:
            indexer.clear(message.rank)
            for tier, hashes in place.log.collected_blocks().items():
                indexer.store(message.rank, tier, hashes)
        place.log.advance(message, now_s)
        self._verify(place, message.rank, message.state, now_s)

    def _verify(self, place: _RankIndex, rank: Rank, state: HeldState, now_s: float) -> None:
        if self._summary(rank) != HeldSummary(state.counts, state.digests):
            place.log.break_off("digest differs", now_s)

    def _summary(self, rank: Rank) -> HeldSummary:
        return self._indexer(self._ranks[rank].scope).summary(rank)

    def _indexer(self, scope: Scope) -> Indexer:
        known = self._indexers.get(scope)
        if known is None:
            known = self._indexers[scope] = self._make_indexer()
        return known


def _apply_event(indexer: Indexer, rank: Rank, event: Event) -> None:
    match event:
        case Stored(tier, packed):
            indexer.store(rank, tier, unpack_hashes(packed))
        case Removed(tier, packed):
            indexer.remove(rank, tier, unpack_hashes(packed))
        case Cleared(tier):
            indexer.clear(rank, tier)
