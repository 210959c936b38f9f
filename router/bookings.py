"""Reservations from their booking to their end: ours, and what callers say of others'."""

from router.core_settings import CoreSettings
from router.effects import Effect, TellReplica
from router.errors import (
    DuplicateReservationError,
    MissingRequestIdError,
    ReservationNotFoundError,
    TooManyReservationsError,
)
from router.foreign import ForeignReservations
from router.indexer.predictions import Predictions
from router.protocol.replicas import (
    CallerTold,
    HandedOver,
    OutputBlockAdded,
    PrefillCompleted,
    ProgressTold,
    ReservationFreed,
)
from router.protocol.values import HashArray, Rank, Scope
from router.scheduler.waiting_room import WaitingRoom
from router.sequence.footprint import Footprint
from router.sequence.tracker import Tracker
from router.sequence.tracking import Tracking
from router.usage_check import UsageCheck


class Bookings:
    """Changes `tracker` and `foreign` together; an id is booked, or waits, in one place only."""

    __slots__ = ("_foreign", "_predictions", "_settings", "_tracker", "_usage", "_waiting")

    def __init__(
        self,
        settings: CoreSettings,
        tracker: Tracker,
        foreign: ForeignReservations,
        predictions: Predictions,
        waiting: WaitingRoom,
        usage: UsageCheck,
    ) -> None:
        self._settings = settings
        self._tracker = tracker
        self._foreign = foreign
        self._predictions = predictions
        self._waiting = waiting
        self._usage = usage

    def bookable_id(self, request_id: str | None) -> str:
        """The id, if it can be booked.

        Raises MissingRequestIdError, DuplicateReservationError, TooManyReservationsError.
        """
        if request_id is None:
            raise MissingRequestIdError
        self._tracker.check_new(request_id)
        if request_id in self._waiting:
            raise DuplicateReservationError(request_id)
        if len(self._tracker) >= self._settings.max_reservations:
            raise TooManyReservationsError(self._settings.max_reservations)
        return request_id

    def book(
        self,
        request_id: str,
        scope: Scope,
        rank: Rank,
        footprint: Footprint,
        found_by: HashArray,
        tracking: Tracking,
        now_s: float,
    ) -> list[Effect]:
        """Book what counts of a request, and take it over from whoever else has booked it.

        `found_by`: what names its blocks in caches.
        """
        counted = tracking.counted(footprint)
        self._tracker.book(request_id, rank, counted, now_s)
        self._foreign.crowd.note_ours(rank, counted, now_s)
        self._predictions.insert(scope, rank, found_by, now_s)
        return self._foreign.pass_on(request_id, ReservationFreed())

    def inherit(self, handed_over: HandedOver, now_s: float) -> list[Effect]:
        """Book as ours what a router that stops has booked, as far as its ranks are known here, and
        tell it. What is ours already stays so.
        """
        effects: list[Effect] = []
        for each in handed_over.reservations:
            if each.request_id in self._waiting:
                continue
            if each.request_id in self._tracker or self._foreign.inherit(
                handed_over.router_id, each, now_s
            ):
                freed = ProgressTold(each.request_id, ReservationFreed())
                effects.append(TellReplica(handed_over.router_id, freed))
        return effects

    def tell(self, request_id: str, told: CallerTold, now_s: float) -> list[Effect]:
        """What a caller says of a request, to whoever has booked it; its end, to all of them.

        Raises ReservationNotFoundError.
        """
        if request_id in self._tracker:
            effects = self.obey(request_id, told, now_s)
            if isinstance(told, ReservationFreed):
                effects += self._foreign.pass_on(request_id, ReservationFreed())
            return effects
        effects = self._foreign.pass_on(request_id, told)
        if not effects:
            raise ReservationNotFoundError(request_id)
        return effects

    def obey(self, request_id: str, told: CallerTold, now_s: float) -> list[Effect]:
        """Do what is said of a reservation of ours; of others it is passed over."""
        if request_id not in self._tracker:
            return []
        effects: list[Effect] = []
        if isinstance(told, PrefillCompleted | ReservationFreed) and told.usage is not None:
            effects += self._usage.compare(request_id, told.usage, now_s)
        match told:
            case PrefillCompleted(_, in_batch):
                self._tracker.prefill_complete(request_id, now_s, in_batch=in_batch)
            case OutputBlockAdded(decay, in_batch) if self._settings.tracking.counts_output:
                self._tracker.add_output_blocks(request_id, 1, decay, now_s, in_batch=in_batch)
            case OutputBlockAdded():
                self._tracker.progress(request_id, now_s)
            case ReservationFreed():
                self._tracker.free(request_id, now_s)
        return effects
