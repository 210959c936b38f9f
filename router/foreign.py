"""What other routers have booked, booked here too.

Their reservations weigh on the ranks as ours do, under keys of their own; one whose rank nobody has
announced to us yet weighs nothing until somebody does. An id names one request wherever it is
booked: a router that is told of another's request passes it on, and of two that have booked the
same one, the one told last keeps it, or the one of higher id where neither knew.
"""

from collections import Counter

from router.effects import Effect, ReplicaGone, TellReplica
from router.fleet import Fleet
from router.indexer.predictions import Predictions
from router.protocol.replicas import (
    CallerTold,
    Frame,
    Progress,
    ProgressTold,
    SharedReservation,
    SnapshotPart,
    SnapshotWanted,
)
from router.protocol.values import Rank, Scope, unpack_hashes
from router.scheduler.crowd import Crowd
from router.sequence.active import BookingId, ForeignId
from router.sequence.footprint import Footprint
from router.sequence.mirror import PeerChange
from router.sequence.replicas import Replicas
from router.sequence.tracker import Tracker


class ForeignReservations:
    """Keeps the tracker's foreign bookings what `replicas` says they are.

    Invariants: every foreign booking is in a mirror, and as it is there; what is in a mirror and
    not booked lies on an unknown rank, was dropped with its rank, was one too many, or is ours now.
    `yielded`: bookings of ours that another router took over; `inherited`: of others' that we did.
    `crowd`: what others book beside us.
    """

    __slots__ = (
        "_fleet",
        "_limit",
        "_predictions",
        "_router_id",
        "_tracker",
        "crowd",
        "inherited",
        "refused",
        "replicas",
        "yielded",
    )  # fmt: skip

    def __init__(
        self, router_id: int, fleet: Fleet, tracker: Tracker, predictions: Predictions, limit: int
    ) -> None:
        self._router_id = router_id
        self._fleet = fleet
        self._tracker = tracker
        self._predictions = predictions
        self._limit = limit
        self.replicas = Replicas(router_id)
        self.crowd = Crowd(router_id)
        self.yielded = 0
        self.inherited = 0
        self.refused = 0

    def apply(self, message: Frame | SnapshotPart, now_s: float) -> list[Effect]:
        """Take in what another router says of its reservations. O(what it tells)."""
        for change in self.replicas.take(message, now_s):
            self._follow(change, now_s)
            if isinstance(message, Frame) and change.before is None and change.after is not None:
                self.crowd.note_theirs(change.router_id, change.after, now_s)
        return self._wants(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Drop what silent routers have booked; ask for what we are known to lack."""
        changes = self.replicas.tick(now_s, is_connected=self._fleet.is_connected)
        for change in changes:
            self._follow(change, now_s)
        self.crowd.keep({mirror.router_id for mirror in self.replicas})
        dropped = Counter(change.router_id for change in changes)
        return [*(ReplicaGone(*each) for each in dropped.items()), *self._wants(now_s)]

    def book_rank(self, rank: Rank, now_s: float) -> None:
        """A rank is new: book what others had booked there. O(all foreign reservations)."""
        for mirror in self.replicas:
            for each in mirror.reservations:
                if each.rank == rank:
                    self._book((mirror.router_id, each.request_id), each, now_s)

    def pass_on(self, request_id: str, told: CallerTold) -> list[Effect]:
        """Tell whoever else has booked a request what a caller told us of it."""
        owners = self.replicas.owners(request_id)
        if not owners:
            return []
        message = ProgressTold(request_id, told)
        return [TellReplica(owner, message) for owner in owners]

    def inherit(self, router_id: int, given: SharedReservation, now_s: float) -> bool:
        """Book another router's reservation, which is none of ours yet, as ours; False where its
        rank is unknown, or ours are too many.
        """
        if self._scope_of(given.rank) is None or len(self._tracker) >= self._limit:
            return False
        key = (router_id, given.request_id)
        if key in self._tracker:
            self._tracker.free(key, now_s)
        self._tracker.book(given.request_id, given.rank, _footprint(given), now_s)
        self._advance(given.request_id, Progress(), given.progress, now_s)
        self.inherited += 1
        return True

    def _wants(self, now_s: float) -> list[Effect]:
        wanted = SnapshotWanted(self._router_id)
        return [TellReplica(router_id, wanted) for router_id in self.replicas.wanted(now_s)]

    def _follow(self, change: PeerChange, now_s: float) -> None:
        key, before, after = (change.router_id, change.request_id), change.before, change.after
        if before is None and self._yields(change):
            self._tracker.free(change.request_id, now_s)
            self.yielded += 1
        is_booked = key in self._tracker
        if before and after and is_booked and before.is_same_booking(after):
            self._advance(key, before.progress, after.progress, now_s)
            return
        if is_booked:
            self._tracker.free(key, now_s)
        if after is not None:
            self._book(key, after, now_s)

    def _yields(self, change: PeerChange) -> bool:
        return self._router_id < change.router_id and change.request_id in self._tracker

    def _book(self, key: ForeignId, reservation: SharedReservation, now_s: float) -> None:
        rank = reservation.rank
        if (scope := self._scope_of(rank)) is None:
            return
        if self._tracker.foreign_count >= self._limit:
            self.refused += 1
            return
        footprint = _footprint(reservation)
        self._tracker.book(key, rank, footprint, now_s)
        hashes = footprint.sequence_hashes
        self._predictions.insert(scope, rank, hashes, now_s)
        self._advance(key, Progress(), reservation.progress, now_s)

    def _scope_of(self, rank: Rank) -> Scope | None:
        """Of a rank that is announced."""
        worker = self._fleet.get(rank.worker_id)
        if worker is None or rank not in worker.announcement.ranks:
            return None
        return worker.announcement.scope

    def _advance(self, key: BookingId, before: Progress, after: Progress, now_s: float) -> None:
        if after.is_prefill_complete and not before.is_prefill_complete:
            self._tracker.prefill_complete(key, now_s)
        grown_blocks = after.output_blocks - before.output_blocks
        if grown_blocks > 0:
            self._tracker.add_output_blocks(key, grown_blocks, after.decay_fraction, now_s)


def _footprint(reservation: SharedReservation) -> Footprint:
    return Footprint(
        unpack_hashes(reservation.sequence_hashes),
        reservation.own_blocks,
        reservation.isl_tokens,
        reservation.cached_tokens,
        reservation.block_size,
    )
