"""The index of every scope, and the trust in each of its ranks.

A message reaches the index only if its rank's event log accepts it, in slices, so that a long one
does not delay requests. After it the index must equal the state that the message reports, in count
and digest; otherwise the rank is broken until a checkpoint heals it.

    message ─▶ EventLog ─▶ APPLY     slice, slice, … ─▶ cursor, holes, check
                           NEW_LIFE  staged slice, … ─▶ switch, cursor, holes, check
"""

from collections.abc import Callable, Generator, Iterable, Iterator

from router.indexer.base import (
    DIFFERENT,
    DONE,
    REFUSED,
    ExportedBlocks,
    HeldSlice,
    HeldSummary,
    Indexer,
    IndexMode,
    IndexStats,
    OverlapScores,
    SearchedTree,
)
from router.indexer.dumps import IndexDump, RankBlocks, RankState, dumped_blocks
from router.indexer.event_log import LogVerdict
from router.indexer.healing import Resync
from router.indexer.rank_index import EVENTS_OFF, NO_CACHE, RankIndex, SourceFault
from router.indexer.restoring import Restoring
from router.indexer.slices import (
    SLICE_BLOCKS,
    HeldBlocks,
    Unfinished,
    apply_rest,
    replace_all,
)
from router.protocol.events import STATE_WORDS, EventBatch, LogMessage, pack_state, unpack_state
from router.protocol.hybrid import LayerClass, Layout
from router.protocol.loads import LoadReport
from router.protocol.replies import Trust, TrustState
from router.protocol.values import SCHEME, HashArray, HeldState, Identity, Rank, Scope

_STATE_BYTES = 8 * STATE_WORDS

_APPLY, _NEW_LIFE, _GAP = LogVerdict.APPLY, LogVerdict.NEW_LIFE, LogVerdict.GAP

_GONE = Trust(TrustState.BLIND, 0, None, "gone")
_NO_INDEX = Trust(TrustState.BLIND, 0, None, "no index: overlap_score_weight is 0")


class TrustedIndex:
    """One `Indexer` per scope and one event log per rank.

    Invariant: a rank holds blocks only in the index of its own scope, and only if it was added.
    `faulty`: the ranks with a fault of their event source. `on_search`: a callback for each search,
    if set; then `tree` gives no tree to search past it.
    """

    __slots__ = (
        "_healing",
        "_indexers",
        "_make_indexer",
        "_mode",
        "_ranks",
        "_restoring",
        "_scheme",
        "_unfinished",
        "faulty",
        "on_search",
    )

    def __init__(
        self,
        make_indexer: Callable[[], Indexer],
        mode: IndexMode = IndexMode.EVENTS,
        scheme: str = SCHEME,
    ) -> None:
        self._scheme = scheme
        self._make_indexer = make_indexer
        self._mode = mode
        self._indexers: dict[Scope, Indexer] = {}
        self._ranks: dict[Rank, RankIndex] = {}
        self.faulty: set[Rank] = set()
        self._unfinished = Unfinished()
        self.on_search: Callable[[Scope, HashArray], None] | None = None
        self._healing = Resync(self._ranks)
        self._restoring = Restoring(self._ranks, self._indexers, self._unfinished, self._healing)

    @property
    def refused_messages(self) -> int:
        """The number of messages that did not fit under the limit on blocks."""
        return self._healing.refused_messages

    @property
    def differences(self) -> int:
        """The number of times a rank's index differed from its agent's report."""
        return self._healing.differences

    def add_rank(
        self,
        rank: Rank,
        scope: Scope,
        identity: Identity,
        now_s: float,
        *,
        no_events: str | None = None,
    ) -> None:
        """Start an empty, blind rank; replaces an earlier rank of this name.

        `no_events`: the reason why it has no event source; None if it has one.
        """
        self.drop_rank(rank)
        indexer = self._indexers.get(scope)
        if indexer is None:
            indexer = self._indexers[scope] = self._make_indexer()
        if self._mode is not IndexMode.EVENTS:
            no_events = no_events if no_events == NO_CACHE else EVENTS_OFF
        self._ranks[rank] = RankIndex(
            scope, identity, indexer, now_s, self._scheme, no_events=no_events
        )

    def drop_rank(self, rank: Rank) -> None:
        """Forget a rank and all its blocks; unknown ones are ignored."""
        place = self._ranks.pop(rank, None)
        if place is None:
            return
        self.faulty.discard(rank)
        self._unfinished.pop(rank, None)
        self._restoring.forget(rank)
        place.indexer.drop_staged(rank)
        place.indexer.clear(rank)
        if all(other.scope != place.scope for other in self._ranks.values()):
            self._indexers.pop(place.scope).close()

    def begin_fill(self) -> None:
        """Prepare for reading the contents of every rank; no queries come until `settle` ends.

        Checkpoints are staged in long slices, and room is made for the ranks known now. O(ranks).
        """
        self._restoring.begin_fill()

    def set_fault(self, rank: Rank, fault: SourceFault | None) -> None:
        """Set what is wrong with a rank's event source; None: nothing. Ignores unknown ranks."""
        place = self._ranks.get(rank)
        if place is None:
            return
        place.fault = fault
        self.faulty.discard(rank)
        if fault is not None:
            self.faulty.add(rank)

    def fault(self, rank: Rank) -> SourceFault | None:
        """Return what is wrong with the event source of a rank. Returns None if nothing is."""
        place = self._ranks.get(rank)
        return None if place is None else place.fault

    def faults(self) -> Iterator[tuple[Rank, SourceFault]]:
        """Yield the faults that matter: not those of the past, of ranks that are exact since."""
        for rank in sorted(self.faulty):
            fault = self._ranks[rank].fault
            if fault is not None and self.has_fault(rank):
                yield rank, fault

    def has_fault(self, rank: Rank) -> bool:
        """Return whether something is wrong with the event source of a rank now."""
        place = self._ranks.get(rank)
        if place is None or place.fault is None:
            return False
        is_past = place.log.broken_reason is None and not place.doubts()
        return place.fault.effect != "explain" or not is_past

    def is_without_events(self, rank: Rank) -> bool:
        """Return whether a rank has no event source by choice."""
        place = self._ranks.get(rank)
        return place is not None and place.no_events is not None

    def is_estimated(self, rank: Rank) -> bool:
        """Return whether bookings are used for this rank in place of events."""
        place = self._ranks.get(rank)
        return place is not None and self._mode is not IndexMode.NONE and place.is_estimated

    def incarnation(self, rank: Rank) -> int | None:
        """Return the incarnation of the rank that the index shows; None if blind, or unknown."""
        place = self._ranks.get(rank)
        return None if place is None else place.log.incarnation

    def apply(self, message: LogMessage, now_s: float) -> LogVerdict | None:
        """Apply a message of the log, or its first slice. Returns None if its rank is unknown.

        While `apply_slice` has more to do, the index is between two messages of this rank.
        """
        rank = message.rank
        place = self._ranks.get(rank)
        if place is None:
            return None
        if self._unfinished:
            self._unfinished.finish(rank)
        if not place.understands(message):
            place.log.break_off("events of another identity than announced", now_s)
            return LogVerdict.FOREIGN
        verdict = place.log.classify(message)
        if verdict is _APPLY or verdict is _NEW_LIFE:
            self._begin(place, rank, message, now_s)
        elif verdict is _GAP:
            place.log.break_off(place.log.broken_reason or "events missing", now_s)
        return verdict

    def apply_slice(self) -> bool:
        """Apply one more slice of the messages begun. Returns False if there is none."""
        return self._unfinished.apply_slice()

    def restore(
        self, rank: Rank, event_id: int, blocks: Iterable[ExportedBlocks], now_s: float
    ) -> bool:
        """Begin to fill a blind rank from a dump, which its checkpoint will replace.

        Returns False if it is not blind. The rest follows with `apply_slice`.
        """
        return self._restoring.restore(rank, event_id, blocks, now_s)

    def resume(self, state: RankState, held: HeldBlocks, now_s: float) -> bool:
        """Begin to fill a blind rank from a snapshot, to continue from its cursor.

        Returns False if it is not blind, or its scope or identity differs. The rest follows with
        `apply_slice`. Some blocks may be newer than the cursor: until `settle`, differing sums are
        ignored.
        """
        return self._restoring.resume(state, held, now_s)

    def settle(self, ranks: int, now_s: float) -> bool:
        """Verify up to `ranks` resumed ranks by their last reports. Returns False if none is left.

        To be called when all events that followed are applied. The last rank ends the fill.
        """
        return self._restoring.settle(ranks, now_s)

    def rank_states(self) -> list[RankState]:
        """Return the states of current ranks, without those with an incomplete checkpoint.

        A rank with a message applied in part has the state before it. O(ranks), below 1 µs each.
        """
        return [
            RankState(
                place.scope,
                rank,
                place.identity,
                log.incarnation,
                log.cursor,
                place.packed_state,
                place.hybrid,
            )
            for rank, place in self._ranks.items()
            if (log := place.log).incarnation is not None
            and log.broken_reason is None
            and not log.is_collecting
            and not place.is_unsettled
        ]

    def compare(self, report: LoadReport, fresh_at_s: float | None, now_s: float) -> None:
        """Compare a load report with the index: it may be behind, or differ at equal event id.

        `fresh_at_s`: the time as of which the report is proven to be complete; None if it is not.
        """
        place = self._ranks[report.rank]
        log = place.log
        place.note_report(report, fresh_at_s)
        if report.incarnation != log.incarnation:
            log.doubt(now_s)
            return
        if report.event_id > log.cursor:
            log.doubt(now_s)
        elif report.event_id == log.cursor and log.broken_reason is None:
            log.doubt_since_s = None
            expected = HeldSummary.of(report.state, place.hybrid)
            place.indexer.check(report.rank, expected)
            self._healing.take_differing(place.indexer, now_s)

    def stream_lost(self, ranks: Iterable[Rank], now_s: float) -> None:
        """Mark ranks as broken: the stream was lost, so their next events leave a gap."""
        for rank in ranks:
            self._ranks[rank].log.break_off("event stream lost", now_s)

    def take_wanted_checkpoints(self, now_s: float) -> list[tuple[Rank, str]]:
        """Return ranks with a persistent doubt, and why; each at most once per retry time."""
        for indexer in self._indexers.values():
            self._healing.take_differing(indexer, now_s)
        return self._healing.take_wanted(now_s)

    def trust(self, rank: Rank, now_s: float) -> Trust:
        """Return the trust in this rank's overlap."""
        place = self._ranks.get(rank)
        if place is None:
            return _GONE
        if self._mode is IndexMode.NONE:
            return _NO_INDEX
        return place.trust(now_s, rank in self._unfinished)

    def find_matches(self, scope: Scope, sequence_hashes: HashArray) -> OverlapScores:
        """Return the longest held prefix, per rank of the scope."""
        self.note_search(scope, sequence_hashes)
        indexer = self._indexers.get(scope)
        return {} if indexer is None else indexer.find_matches(sequence_hashes)

    def resumable(
        self, scope: Scope, sequence_hashes: HashArray, isl_tokens: int, block_size: int
    ) -> OverlapScores:
        """Return what ranks of the scope need not compute again of a prompt, in blocks.

        See `Indexer`; like `find_matches`, but cut on hybrid ranks to where it can be resumed.
        """
        self.note_search(scope, sequence_hashes)
        indexer = self._indexers.get(scope)
        if indexer is None:
            return {}
        return indexer.resumable(sequence_hashes, isl_tokens, block_size)

    def layout(self, rank: Rank) -> Layout | None:
        """Return the layout in the last message of a hybrid rank. Returns None for others."""
        place = self._ranks.get(rank)
        return None if place is None or place.hybrid is None else place.hybrid.layout

    def class_blocks(self, rank: Rank) -> list[tuple[LayerClass, int]]:
        """Return the classes of a rank's layout, each with the number of its blocks. O(1)."""
        layout = self.layout(rank)
        if layout is None:
            return []
        counts = self._ranks[rank].indexer.summary(rank).class_counts
        return list(zip(layout.classes, counts, strict=False))

    def keeps_prompts(self, rank: Rank) -> bool:
        """Return whether a rank keeps all blocks of a prompt: it has full attention alone."""
        layout = self.layout(rank)
        return layout is None or not layout.classes

    def trees(self, scope: Scope) -> tuple[SearchedTree, ...]:
        """Return the trees that `find_matches` searches."""
        indexer = self._indexers.get(scope)
        return () if indexer is None else indexer.trees

    def note_search(self, scope: Scope, sequence_hashes: HashArray) -> None:
        """Report a search of the `trees` that belongs to no decision."""
        if self.on_search is not None:
            self.on_search(scope, sequence_hashes)

    def is_broken(self, rank: Rank) -> bool:
        """Return whether the rank's contents are known to be wrong, until a checkpoint heals it."""
        return self._ranks[rank].log.broken_reason is not None

    def doubts(self, rank: Rank) -> int:
        """Return why the rank's agent cannot vouch for its reports: its latest sum of `Doubt`s."""
        return self._ranks[rank].doubts()

    def fresh_at_s(self, rank: Rank) -> float:
        """Return the time as of which the rank's index is proven complete; -inf if it never was."""
        return self._ranks[rank].fresh_at_s

    def held_blocks(self, rank: Rank) -> int:
        """Return the number of blocks the rank holds, counted once per tier. O(1)."""
        return sum(self._ranks[rank].indexer.summary(rank).counts)

    def held_state(self, rank: Rank) -> HeldState:
        """Return the rank's state in the index, with its last reported holes and doubts. O(1)."""
        place = self._ranks[rank]
        summary, reported = place.indexer.summary(rank), unpack_state(place.packed_state)
        return HeldState(reported.holes, summary.counts, summary.digests, reported.doubts)

    def stats(self) -> dict[Scope, IndexStats]:
        """Return the size of each scope's index, and the results of its self-checks."""
        return {scope: indexer.stats() for scope, indexer in self._indexers.items()}

    def sweep(self, sub_tables: int) -> bool:
        """Free a slice of the blocks of cleared ranks. Returns False once nothing is left."""
        left = [indexer.sweep(sub_tables) for indexer in self._indexers.values()]
        return any(left)

    def dump(self) -> Iterator[tuple[Scope, RankBlocks]]:
        """Yield all held blocks, by scope, rank and tier."""
        return dumped_blocks(IndexDump(self.event_ids(), list(self.dump_slices())))

    def event_ids(self) -> dict[Rank, int]:
        """Return the last event of every rank that the index shows."""
        return {rank: place.log.cursor for rank, place in self._ranks.items()}

    def dump_slices(self) -> Iterator[tuple[Scope, HeldSlice]]:
        """Yield all held blocks in slices; in between all may change, and a scope may disappear."""
        return self._slices(lambda indexer: indexer.dump_slices())

    def dump_class_slices(self) -> Iterator[tuple[Scope, HeldSlice]]:
        """Yield the blocks of hybrid ranks' classes like `dump_slices`, class c as tier c."""
        return self._slices(lambda indexer: indexer.dump_class_slices())

    def _slices(
        self, dump: Callable[[Indexer], Iterator[HeldSlice]]
    ) -> Iterator[tuple[Scope, HeldSlice]]:
        for scope, indexer in sorted(self._indexers.items()):
            for part in dump(indexer) if self._indexers.get(scope) is indexer else ():
                yield scope, part
                if self._indexers.get(scope) is not indexer:
                    break

    def _begin(self, place: RankIndex, rank: Rank, message: LogMessage, now_s: float) -> None:
        if isinstance(message, EventBatch):
            reached = place.indexer.apply(rank, message, 0, SLICE_BLOCKS)
            if reached == DONE:  # nearly every message; `_end` would do the same
                place.packed_state = message.packed[:_STATE_BYTES]
                place.hybrid = message.hybrid
                place.log.resume(message.incarnation, message.last_event_id)
                return
            slices = apply_rest(place.indexer, rank, message, reached)
        else:
            blocks = list(place.log.collected_blocks())
            slice_blocks = self._restoring.staged_slice_blocks
            slices = replace_all(place.indexer, message, blocks, slice_blocks)
        self._unfinished[rank] = self._end_after(slices, place, message, now_s)
        self.apply_slice()

    def _end_after(
        self,
        slices: Generator[None, None, int],
        place: RankIndex,
        message: LogMessage,
        now_s: float,
    ) -> Iterator[None]:
        outcome = yield from slices
        self._end(place, message, outcome, now_s)
        self._healing.take_differing(place.indexer, now_s)

    def _end(self, place: RankIndex, message: LogMessage, outcome: int, now_s: float) -> None:
        """Record the end of a message: its cursor and state, and whether the index matches."""
        place.hybrid = message.hybrid
        if isinstance(message, EventBatch):
            place.packed_state = message.packed[:_STATE_BYTES]
            place.log.resume(message.incarnation, message.last_event_id)
        else:
            place.packed_state = pack_state(message.state)
            place.log.resume(message.incarnation, message.event_id)
        if outcome == DIFFERENT:
            self._healing.break_off(place, message.rank, now_s)
        elif outcome == REFUSED:
            self._healing.refuse(place, now_s)
