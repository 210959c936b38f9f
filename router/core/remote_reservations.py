"""Reservations of other routers, booked here too.

They weigh on the ranks as this router's do, under keys of their own. A reservation on a rank that
is not announced yet weighs nothing until it is. An id names one request wherever it is booked: a
router that receives a report on another router's request forwards it. If two routers book the same
request, the later booking stays; if neither knew of the other's, the booking of the router with the
higher id.
"""

from collections import Counter

from router.core.effects import Effect, ReplicaGone, TellReplica
from router.core.fleet import Fleet
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
from router.scheduler.herd import HerdEstimate
from router.sequence.active.footprint import Footprint
from router.sequence.active.tracker import BookingId, ForeignId, Tracker
from router.sequence.rank_table import RankTable
from router.sequence.replicas.peer_reservations import PeerChange
from router.sequence.replicas.replica_set import ReplicaSet

NO_PROGRESS = Progress()


class RemoteReservations:
    """The tracker's foreign bookings, kept equal to what `replicas` contains.

    Invariants: every foreign booking is in a mirror, and equal to it. A reservation in a mirror
    that is not booked is on an unknown rank, was dropped with its rank, exceeded the limit, or is
    booked by this router now. `yielded`: the number of own bookings that another router took over;
    `inherited`: those of others taken over here; `refused`: those beyond the limit. `herd`: an
    estimate of the requests that other routers place concurrently. `differing`: by router and
    worker, its block size there and here where they differ, as one registration of it is wrong.
    """

    __slots__ = (
        "_fleet",
        "_predictions",
        "_ranks",
        "_router_id",
        "_tracker",
        "differing",
        "herd",
        "inherited",
        "limit",
        "refused",
        "replicas",
        "yielded",
    )  # fmt: skip

    def __init__(
        self,
        router_id: int,
        fleet: Fleet,
        predictions: Predictions,
        ranks: RankTable,
        tracker: Tracker,
        limit: int,
    ) -> None:
        self._router_id = router_id
        self._fleet = fleet
        self._tracker = tracker
        self._predictions = predictions
        self._ranks = ranks
        self.limit = limit
        self.replicas = ReplicaSet(router_id)
        self.herd = HerdEstimate(router_id, ranks)
        self.differing: dict[tuple[int, int], tuple[int, int]] = {}
        self.yielded = 0
        self.inherited = 0
        self.refused = 0

    @property
    def unplaced(self) -> int:
        """The number of reservations in mirrors that are not booked; see the class. O(routers)."""
        return sum(len(each.reservations) for each in self.replicas) - self._tracker.foreign_count

    def apply(self, message: Frame | SnapshotPart, now_s: float) -> list[Effect]:
        """Apply a message of another router about its reservations. O(reservations in it)."""
        changes = self.replicas.take(message, now_s)
        for change in changes:
            self._follow(change, now_s)
        if isinstance(message, Frame):
            begun = [each.after for each in changes if each.before is None and each.after]
            if begun:
                self.herd.note_theirs(message.router_id, begun, now_s)
        return self._wants(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Drop the bookings of silent routers, and request snapshots that are missing."""
        changes = self.replicas.tick(now_s, is_connected=self._fleet.is_connected)
        for change in changes:
            self._follow(change, now_s)
        alive = {mirror.router_id for mirror in self.replicas}
        self.herd.keep(alive)
        for gone in [each for each in self.differing if each[0] not in alive]:
            del self.differing[gone]
        dropped = Counter(change.router_id for change in changes)
        return [*(ReplicaGone(*each) for each in dropped.items()), *self._wants(now_s)]

    def book_rank(self, rank: Rank, now_s: float) -> None:
        """Book what other routers had booked on a new rank. O(all foreign reservations)."""
        for mirror in self.replicas:
            for each in mirror.reservations:
                if each.rank == rank:
                    self._book((mirror.router_id, each.request_id), each, now_s)

    def pass_on(self, request_id: str, progress: CallerTold) -> list[Effect]:
        """Return effects that forward a caller's report to other routers that booked it."""
        owners = self.replicas.owners(request_id)
        if not owners:
            return []
        message = ProgressTold(request_id, progress)
        return [TellReplica(owner, message) for owner in owners]

    def adopt_reservations(self, router_id: int, given: SharedReservation, now_s: float) -> bool:
        """Book another router's reservation, which is not booked by this one, as its own.

        Returns False if its rank is unknown, or the limit is reached.
        """
        if self._scope_of(given.rank) is None or len(self._tracker) >= self.limit:
            return False
        key = (router_id, given.request_id)
        if key in self._tracker:
            self._tracker.free(key, now_s)
        self._tracker.book(given.request_id, given.rank, _footprint(given), now_s)
        self._advance(given.request_id, NO_PROGRESS, given.progress, now_s)
        self.inherited += 1
        return True

    def _wants(self, now_s: float) -> list[Effect]:
        wanted = SnapshotWanted(self._router_id)
        return [TellReplica(router_id, wanted) for router_id in self.replicas.wanted(now_s)]

    def _follow(self, change: PeerChange, now_s: float) -> None:
        key, before, after = (change.router_id, change.request_id), change.before, change.after
        if before is None:
            if self._yields(change):
                self._tracker.free(change.request_id, now_s)
                self.yielded += 1
        elif key in self._tracker:
            if after is not None and before.is_same_booking(after):
                self._advance(key, before.progress, after.progress, now_s)
                return
            self._tracker.free(key, now_s)
        if after is not None:
            self._book(key, after, now_s)

    def _yields(self, change: PeerChange) -> bool:
        return self._router_id < change.router_id and change.request_id in self._tracker

    def _book(self, key: ForeignId, reservation: SharedReservation, now_s: float) -> None:
        rank = reservation.rank
        if rank not in self._ranks:
            return
        if self._tracker.foreign_count >= self.limit:
            self.refused += 1
            return
        footprint = _footprint(reservation)
        self._tracker.book(key, rank, footprint, now_s)
        self._compare_block_size(key[0], reservation)
        if self._predictions.are_made and (scope := self._scope_of(rank)) is not None:
            self._predictions.insert(scope, rank, footprint.sequence_hashes, now_s)
        self._advance(key, NO_PROGRESS, reservation.progress, now_s)

    def _compare_block_size(self, router_id: int, reservation: SharedReservation) -> None:
        worker = self._fleet.get(reservation.rank.worker_id)
        if worker is None:
            return
        key, here = (router_id, reservation.rank.worker_id), worker.announcement.identity.block_size
        if reservation.block_size != here:
            self.differing[key] = (reservation.block_size, here)
        elif self.differing:
            self.differing.pop(key, None)

    def _scope_of(self, rank: Rank) -> Scope | None:
        """Return the scope of a rank. Returns None if it is not announced."""
        worker = self._fleet.get(rank.worker_id)
        if worker is None or rank not in worker.ranks:
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
