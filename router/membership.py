"""Ranks that come and go: a rank's blocks, load and reservations do so together."""

from router.effects import Effect, WorkerGone
from router.fleet import Fleet
from router.foreign import ForeignReservations
from router.indexer.predictions import Predictions
from router.indexer.trusted_index import TrustedIndex
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import Rank
from router.scheduler.gate import Gate
from router.scheduler.predictor import Predictor
from router.sequence.rank_table import RankTable
from router.sequence.tracker import Tracker
from router.standing import Standing


class Membership:
    """Tells everything that keeps something of a rank when the rank comes, changes and goes."""

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
        foreign: ForeignReservations,
        standing: Standing,
        gate: Gate,
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

    def upsert_worker(self, announcement: WorkerAnnouncement, now_s: float) -> None:
        """Add a worker or take over what it announces now. A new life forgets the old one."""
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
        """Take a worker out; unknown ones are passed over."""
        worker = self._fleet.get(worker_id)
        if worker is None:
            return []
        self._fleet.remove(worker_id)
        return [self._forget_worker(worker.announcement, reason)]

    def remove_silent(self, now_s: float) -> list[Effect]:
        """Take out the workers that have been silent for too long."""
        return [self._forget_worker(gone, "silent") for gone in self._fleet.take_gone(now_s)]

    def _kept_ranks(self, before: WorkerAnnouncement, after: WorkerAnnouncement) -> set[Rank]:
        """Ranks whose index and reservations survive a change of announcement.

        A new life keeps nothing, unless its first checkpoint came before its announcement.
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
        self._index.add_rank(rank, announcement.scope, announcement.identity, now_s)
        self._predictor.add(rank, announcement.scope.model_name, now_s)
        self._standing.note(rank, now_s)
        self._foreign.book_rank(rank, now_s)

    def _forget_worker(self, announcement: WorkerAnnouncement, reason: str) -> WorkerGone:
        dropped = sum(self._forget_rank(rank) for rank in announcement.ranks)
        return WorkerGone(announcement.worker_id, reason, dropped)

    def _forget_rank(self, rank: Rank) -> int:
        """Answers how many reservations of ours went with it."""
        self._index.drop_rank(rank)
        self._predictions.drop_rank(rank)
        dropped = sum(isinstance(each, str) for each in self._tracker.drop_rank(rank))
        self._predictor.drop(rank)
        self._gate.forget(rank)
        self._ranks.drop(rank)
        return dropped
