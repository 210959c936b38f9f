"""The index of every scope, and how far each rank in it can be believed.

A message reaches the index only if its rank's event log says so, in slices, so that a long one does
not hold up requests; after it the index must equal what the message says the rank holds, in count
and digest, or the rank is broken until a checkpoint heals it.

    message ─▶ EventLog ─▶ APPLY     slice, slice, … ─▶ cursor, holes, check
                           NEW_LIFE  staged slice, … ─▶ switch, cursor, holes, check
"""

from collections.abc import Callable, Generator, Iterable, Iterator

from msgspec import Struct
from msgspec.structs import astuple

from router.indexer.base import (
    DIFFERENT,
    DONE,
    REFUSED,
    HeldBlocks,
    HeldSummary,
    Indexer,
    IndexMode,
    IndexStats,
    OverlapScores,
)
from router.indexer.event_log import EventLog, Verdict
from router.indexer.slices import SLICE_BLOCKS, apply_rest, replace_all
from router.protocol.events import EventBatch, LogMessage, pack_state, unpack_holes
from router.protocol.loads import LoadReport
from router.protocol.replies import Trust, TrustState
from router.protocol.values import SCHEME, TIERS, HashArray, HeldState, Identity, Rank, Scope, Tier

CHECKPOINT_WAIT_S = 1.0
"""How long a doubt waits to be healed by the log itself before a checkpoint is asked for."""

CHECKPOINT_RETRY_S = 2.0
"""How long an asked-for checkpoint may take before it is asked for again."""


ROOM_WANTED = 0.9
"""A rank that did not fit is tried again when so much of the limit, or less, is in use."""

_HOLES_BYTES = 8 * TIERS

_APPLY, _NEW_LIFE, _GAP = Verdict.APPLY, Verdict.NEW_LIFE, Verdict.GAP

_FULL = "limit on indexed blocks reached"


_WITHOUT_EVENTS = {
    IndexMode.APPROXIMATE: Trust(
        TrustState.DEGRADED, 0, None, "guessed from decisions: use_kv_events is false"
    ),
    IndexMode.NONE: Trust(TrustState.BLIND, 0, None, "no index: overlap_score_weight is 0"),
}


class _RankIndex:
    """One rank's place in the index."""

    __slots__ = (
        "asked_s",
        "identity",
        "indexer",
        "is_readable",
        "log",
        "packed_holes",
        "reported_event_id",
        "scope",
    )

    def __init__(self, scope: Scope, identity: Identity, indexer: Indexer, now_s: float) -> None:
        self.scope = scope
        self.identity = identity
        self.indexer = indexer
        self.is_readable = identity.scheme == SCHEME
        self.packed_holes = b""
        self.log = EventLog(now_s)
        self.reported_event_id = 0
        self.asked_s = float("-inf")


class RankBlocks(Struct, frozen=True):
    """Blocks of one rank in one tier, and the event as of which it held them."""

    rank: Rank
    tier: Tier
    event_id: int
    sequence_hashes: HashArray


class RankState(Struct, frozen=True, array_like=True):
    """Where a rank stands: the life, event and sums that its part of the index shows."""

    scope: Scope
    rank: Rank
    identity: Identity
    incarnation: int
    event_id: int
    held: HeldState


class TrustedIndex:
    """One `Indexer` per scope and one event log per rank.

    Invariant: a rank holds blocks only in the index of its own scope, and only if it was added.
    `refused_messages`: how many did not fit under the limit on blocks.
    """

    __slots__ = ("_indexers", "_make_indexer", "_mode", "_ranks", "_unfinished", "refused_messages")

    def __init__(
        self, make_indexer: Callable[[], Indexer], mode: IndexMode = IndexMode.EVENTS
    ) -> None:
        self._make_indexer = make_indexer
        self._mode = mode
        self._indexers: dict[Scope, Indexer] = {}
        self._ranks: dict[Rank, _RankIndex] = {}
        self._unfinished: dict[Rank, Iterator[None]] = {}
        self.refused_messages = 0

    def add_rank(self, rank: Rank, scope: Scope, identity: Identity, now_s: float) -> None:
        """Start an empty, blind rank, in place of what was known under this name."""
        self.drop_rank(rank)
        indexer = self._indexers.get(scope)
        if indexer is None:
            indexer = self._indexers[scope] = self._make_indexer()
        self._ranks[rank] = _RankIndex(scope, identity, indexer, now_s)

    def drop_rank(self, rank: Rank) -> None:
        """Forget a rank and all its blocks; unknown ones are passed over."""
        place = self._ranks.pop(rank, None)
        if place is None:
            return
        self._unfinished.pop(rank, None)
        place.indexer.drop_staged(rank)
        place.indexer.clear(rank)
        if all(other.scope != place.scope for other in self._ranks.values()):
            self._indexers.pop(place.scope).close()

    def incarnation(self, rank: Rank) -> int | None:
        """Which life of the rank the index shows; None while blind, or unknown."""
        place = self._ranks.get(rank)
        return None if place is None else place.log.incarnation

    def apply(self, message: LogMessage, now_s: float) -> Verdict | None:
        """Apply a message of the log, or its first slice; None if its rank is unknown.

        While `apply_slice` has more to do, the index is between two messages of this rank.
        """
        rank = message.rank
        place = self._ranks.get(rank)
        if place is None:
            return None
        while self._unfinished and rank in self._unfinished:
            self.apply_slice()
        if message.identity != place.identity or not place.is_readable:
            place.log.break_off("events of another identity than announced", now_s)
            return Verdict.FOREIGN
        verdict = place.log.classify(message)
        if verdict is _APPLY or verdict is _NEW_LIFE:
            self._begin(place, rank, message, now_s)
        elif verdict is _GAP:
            place.log.break_off(place.log.broken_reason or "events missing", now_s)
        return verdict

    def apply_slice(self) -> bool:
        """Apply one more slice of the messages begun; False if there is none."""
        for rank, slices in self._unfinished.items():
            if next(slices, self) is self:
                del self._unfinished[rank]
            return True
        return False

    def restore(
        self, rank: Rank, event_id: int, blocks: Iterable[HeldBlocks], now_s: float
    ) -> bool:
        """Fill a blind rank from a dump, until its checkpoint comes; False if it is not blind."""
        place = self._ranks.get(rank)
        if place is None or not place.log.is_blind:
            return False
        place.indexer.clear(rank)
        for held in blocks:
            place.indexer.store(rank, held.tier, held.sequence_hashes)
        place.log.restored(event_id, now_s)
        return True

    def resume(self, state: RankState, blocks: Iterable[HeldBlocks], now_s: float) -> bool:
        """Let a blind rank go on from where it once stood; False if it is not blind, or another.

        Blocks that do not add up to the state leave it broken.
        """
        place = self._ranks.get(state.rank)
        if place is None or not place.log.is_blind:
            return False
        if (place.scope, place.identity) != (state.scope, state.identity):
            return False
        kept = [place.indexer.store(state.rank, b.tier, b.sequence_hashes) for b in blocks]
        place.log.resume(state.incarnation, state.event_id, now_s)
        if all(kept):
            place.packed_holes = pack_state(state.held)
            place.indexer.note_holes(state.rank, state.held.holes)
            self._check(place, state.rank, state.held, now_s)
        else:
            self._refuse(place, now_s)
        return True

    def rank_states(self) -> list[RankState]:
        """Where every rank stands that adds up."""
        return [
            RankState(
                place.scope,
                rank,
                place.identity,
                log.incarnation,
                log.cursor,
                self._state(place, rank),
            )
            for rank, place in sorted(self._ranks.items())
            if (log := place.log).incarnation is not None
            and log.broken_reason is None
            and rank not in self._unfinished
        ]

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
            self._check(place, report.rank, report.state, now_s)

    def stream_lost(self, now_s: float) -> None:
        """The stream was wiped: whatever follows does not continue what was read."""
        for place in self._ranks.values():
            place.log.break_off("event stream lost", now_s)

    def take_wanted_checkpoints(self, now_s: float) -> list[tuple[Rank, str]]:
        """Ranks whose doubt has lasted, and why; each is named at most once per retry time."""
        wanted: list[tuple[Rank, str]] = []
        if self._mode is not IndexMode.EVENTS:
            return wanted
        for indexer in self._indexers.values():
            self._take_differing(indexer, now_s)
        for rank, place in self._ranks.items():
            if place.log.broken_reason == _FULL and not _has_room(place.indexer):
                continue
            since = place.log.doubt_since_s
            waited = since is not None and now_s - since >= CHECKPOINT_WAIT_S
            if waited and now_s - place.asked_s >= CHECKPOINT_RETRY_S:
                place.asked_s = now_s
                wanted.append((rank, place.log.broken_reason or "behind its reports"))
        return wanted

    def trust(self, rank: Rank, now_s: float) -> Trust:
        """How far this rank's overlap can be believed."""
        if self._mode is not IndexMode.EVENTS:
            return _WITHOUT_EVENTS[self._mode]
        place = self._ranks[rank]
        log = place.log
        age_s = None if log.updated_s is None else round(now_s - log.updated_s, 3)
        if not place.is_readable:
            reason = f"hash scheme {place.identity.scheme!r} is not {SCHEME!r}"
            return Trust(TrustState.BLIND, log.cursor, age_s, reason)
        if log.broken_reason is not None:
            state = TrustState.BLIND if log.is_blind else TrustState.DEGRADED
            return Trust(state, log.cursor, age_s, log.broken_reason)
        if rank in self._unfinished:
            reason = "a message is being applied"
            return Trust(TrustState.LAGGING, log.cursor, age_s, reason)
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
        return sum(self._ranks[rank].indexer.summary(rank).counts)

    def stats(self) -> dict[Scope, IndexStats]:
        """How full the index of each scope is, and how its self-checks ended."""
        return {scope: indexer.stats() for scope, indexer in self._indexers.items()}

    def sweep(self, sub_tables: int) -> bool:
        """Free a slice of what cleared ranks left behind; False once nothing is left to do."""
        left = [indexer.sweep(sub_tables) for indexer in self._indexers.values()]
        return any(left)

    def dump(self) -> Iterator[tuple[Scope, RankBlocks]]:
        """Everything held, by scope, rank and tier."""
        for scope, indexer in sorted(self._indexers.items()):
            for rank, tier, sequence_hashes in map(astuple, indexer.dump()):
                event_id = self._ranks[rank].log.cursor
                yield scope, RankBlocks(rank, tier, event_id, sequence_hashes)

    def _begin(self, place: _RankIndex, rank: Rank, message: LogMessage, now_s: float) -> None:
        if isinstance(message, EventBatch):
            reached = place.indexer.apply(rank, message, 0, SLICE_BLOCKS)
            if reached == DONE:  # nearly every message; `_end` would say the same
                place.packed_holes = message.packed[:_HOLES_BYTES]
                place.log.resume(message.incarnation, message.last_event_id, now_s)
                return
            slices = apply_rest(place.indexer, rank, message, reached)
        else:
            blocks = place.log.collected_blocks()
            slices = replace_all(place.indexer, rank, blocks, message.state)
        self._unfinished[rank] = self._end_after(slices, place, message, now_s)
        self.apply_slice()

    def _end_after(
        self,
        slices: Generator[None, None, int],
        place: _RankIndex,
        message: LogMessage,
        now_s: float,
    ) -> Iterator[None]:
        outcome = yield from slices
        self._end(place, message, outcome, now_s)
        self._take_differing(place.indexer, now_s)

    def _end(self, place: _RankIndex, message: LogMessage, outcome: int, now_s: float) -> None:
        """A message is applied: believe the index as of it, if it adds up."""
        if isinstance(message, EventBatch):
            place.packed_holes = message.packed[:_HOLES_BYTES]
            place.log.resume(message.incarnation, message.last_event_id, now_s)
        else:
            place.packed_holes = pack_state(message.state)
            place.log.resume(message.incarnation, message.event_id, now_s)
        if outcome == DIFFERENT:
            self._break_off(place, message.rank, now_s)
        elif outcome == REFUSED:
            self._refuse(place, now_s)

    def _state(self, place: _RankIndex, rank: Rank) -> HeldState:
        summary = place.indexer.summary(rank)
        return HeldState(unpack_holes(place.packed_holes), summary.counts, summary.digests)

    def _refuse(self, place: _RankIndex, now_s: float) -> None:
        self.refused_messages += 1
        place.log.break_off(_FULL, now_s)

    def _check(self, place: _RankIndex, rank: Rank, state: HeldState, now_s: float) -> None:
        place.indexer.check(rank, HeldSummary(state.counts, state.digests))
        self._take_differing(place.indexer, now_s)

    def _take_differing(self, indexer: Indexer, now_s: float) -> None:
        for rank in indexer.take_differing():
            place = self._ranks.get(rank)
            if place is not None:
                self._break_off(place, rank, now_s)

    def _break_off(self, place: _RankIndex, rank: Rank, now_s: float) -> None:
        """What differs for want of room is not healed by saying it again."""
        place.indexer.note_holes(rank, None)
        place.log.break_off("digest differs" if _has_room(place.indexer) else _FULL, now_s)


def _has_room(indexer: Indexer) -> bool:
    stats = indexer.stats()
    return not stats.max_blocks or stats.blocks <= ROOM_WANTED * stats.max_blocks
