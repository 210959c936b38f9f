"""Addition and removal of ranks, together with their blocks, load and reservations."""

from router.core.effects import Effect, WorkerGone
from router.core.fleet import Fleet
from router.core.rank_status import RankStatus
from router.core.remote_reservations import RemoteReservations
from router.indexer.predictions import Predictions
from router.indexer.rank_index import NO_CACHE, NO_SOURCE, SourceFault
from router.indexer.trusted_index import TrustedIndex
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import Rank
from router.scheduler.eligibility import Eligibility
from router.scheduler.predictor.predictor import Predictor
from router.sequence.active.tracker import Tracker
from router.sequence.rank_table import RankTable


class Membership:
    """The components with state per rank, updated when a rank is added, changed or removed."""

    __slots__ = (
        "_fleet",
        "_foreign",
        "_gate",
        "_index",
        "_predictions",
        "_predictor",
        "_ranks",
        "_standing",
        "_tracker",
    )

    def __init__(
        self,
        fleet: Fleet,
        index: TrustedIndex,
        predictions: Predictions,
        ranks: RankTable,
        tracker: Tracker,
        predictor: Predictor,
        foreign: RemoteReservations,
        standing: RankStatus,
        gate: Eligibility,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._predictions = predictions
        self._ranks = ranks
        self._tracker = tracker
        self._predictor = predictor
        self._foreign = foreign
        self._standing = standing
        self._gate = gate

    def set_fault(self, rank: Rank, fault: SourceFault | None, now_s: float) -> None:
        """Set what is wrong with the event source of a rank; None: nothing. O(its estimates)."""
        self._index.set_fault(rank, fault)
        self.note_source(rank, now_s)

    def note_source(self, rank: Rank, now_s: float) -> None:
        """Begin or end to estimate the blocks of a rank, as its event source requires."""
        self._predictions.set_without_events(rank, is_without=self._index.is_estimated(rank))
        self._standing.note(rank, now_s)

    def upsert_worker(self, announcement: WorkerAnnouncement, now_s: float) -> None:
        """Add a worker, or apply its changed announcement.

        A new incarnation discards the state of the previous one.
        """
        known = self._fleet.get(announcement.worker_id)
        before = None if known is None else known.announcement
        self._fleet.put(announcement, now_s)
        if announcement == before:
            return
        kept = set() if before is None else self._kept_ranks(before, announcement)
        for rank in before.ranks if before is not None else ():
            if rank not in kept:
                self._forget_rank(rank)
        for rank in announcement.ranks:
            self._standing.note_worker(rank, announcement)
            if rank in kept:
                self._predictor.note_announced(rank)
                self._standing.note(rank, now_s)
            else:
                self._add_rank(rank, announcement, now_s)

    def remove_worker(self, worker_id: int, reason: str) -> list[Effect]:
        """Remove a worker; unknown workers are ignored."""
        worker = self._fleet.get(worker_id)
        if worker is None:
            return []
        self._fleet.remove(worker_id)
        return [self._forget_worker(worker.announcement, reason)]

    def remove_silent(self, now_s: float) -> list[Effect]:
        """Remove the workers that exceeded their heartbeat timeout."""
        return [self._forget_worker(gone, "silent") for gone in self._fleet.take_gone(now_s)]

    def _kept_ranks(self, before: WorkerAnnouncement, after: WorkerAnnouncement) -> set[Rank]:
        """Return the ranks that keep their index and reservations after a changed announcement.

        A new incarnation keeps none, unless its first checkpoint arrived before its announcement.
        """
        if (before.scope, before.identity) != (after.scope, after.identity):
            return set()
        both = {
            rank
            for rank in set(before.ranks) & set(after.ranks)
            if before.source(rank) == after.source(rank)
        }
        if before.incarnation == after.incarnation:
            return both
        return {rank for rank in both if self._index.incarnation(rank) == after.incarnation}

    def _add_rank(self, rank: Rank, announcement: WorkerAnnouncement, now_s: float) -> None:
        known = (rank, announcement.scope, announcement.identity, now_s)
        no_events = None if announcement.has_events else NO_SOURCE
        if not announcement.caches_prefixes:
            no_events = NO_CACHE
        self._index.add_rank(*known, no_events=no_events)
        self._predictions.set_without_events(rank, is_without=self._index.is_estimated(rank))
        self._predictor.add(rank, announcement.scope.model_name, now_s)
        self._standing.note(rank, now_s)
        self._foreign.book_rank(rank, now_s)

    def _forget_worker(self, announcement: WorkerAnnouncement, reason: str) -> WorkerGone:
        dropped = sum(self._forget_rank(rank) for rank in announcement.ranks)
        return WorkerGone(announcement.worker_id, reason, dropped)

    def _forget_rank(self, rank: Rank) -> int:
        """Remove all state of a rank. Returns the number of own reservations dropped with it."""
        self._index.drop_rank(rank)
        self._predictions.drop_rank(rank)
        dropped = sum(isinstance(each, str) for each in self._tracker.drop_rank(rank))
        self._predictor.drop(rank)
        self._gate.forget(rank)
        self._foreign.herd.forget_rank(rank)
        self._ranks.drop(rank)
        return dropped
