"""The reservations of this router: made on the rank that `Placer` or a caller has chosen.

Each keeps what is expected of its prompt, to be compared with the usage that its engine reports.
"""

from math import inf

from msgspec.structs import astuple

from router.core.effects import Effect, TellReplica
from router.core.errors import MissingRequestIdError, TooManyReservationsError
from router.core.placement import Placement
from router.core.placer import Placer
from router.core.remote_reservations import RemoteReservations
from router.core.settings import CoreSettings
from router.core.usage_check import UsageCheck
from router.indexer.base import NO_OVERLAP
from router.indexer.predictions import Predictions
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.replicas import (
    CallerTold,
    HandedOver,
    OutputBlockAdded,
    PrefillCompleted,
    ProgressTold,
    PromptUsage,
    ReservationFreed,
)
from router.protocol.requests import ReserveRequest, SelectRequest
from router.protocol.values import Rank, Scope
from router.scheduler.errors import SloNotMetError
from router.scheduler.queue.waiting_room import WaitingRoom
from router.scheduler.terms import OVERLAP_DEVICE, OVERLAP_REMOTE
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError
from router.sequence.active.footprint import COUNT_ALL, ExpectedUsage, TrackedParts
from router.sequence.active.promises import Promise
from router.sequence.active.prompt import HashedPrompt, Prompt
from router.sequence.active.tracker import Tracker

CALLERS_CLASS = "default"
"""Class in which objectives of bookings on a rank that the caller chose are counted."""


class Reservations:
    """The reservations of this router, and the step from a placed prompt to its reservation.

    Changes the tracker and the remote reservations together, so that an id is in one place only; a
    request id is either booked or waits.
    """

    __slots__ = (
        "_foreign",
        "_placer",
        "_predictions",
        "_settings",
        "_tracker",
        "_usage",
        "_waiting",
    )

    def __init__(
        self,
        settings: CoreSettings,
        placer: Placer,
        tracker: Tracker,
        foreign: RemoteReservations,
        predictions: Predictions,
        waiting: WaitingRoom,
        usage: UsageCheck,
    ) -> None:
        self._settings = settings
        self._placer = placer
        self._tracker = tracker
        self._foreign = foreign
        self._predictions = predictions
        self._waiting = waiting
        self._usage = usage

    def reconfigure(self, settings: CoreSettings) -> None:
        """Apply changed settings; what is booked stays booked."""
        self._settings = settings
        self._foreign.limit = settings.max_reservations

    def bookable_id(self, request_id: str | None) -> str:
        """Return the id, if it can be booked.

        Raises MissingRequestIdError, DuplicateReservationError, TooManyReservationsError.
        """
        if request_id is None:
            raise MissingRequestIdError
        tracker, limit = self._tracker, self._settings.max_reservations
        if request_id in tracker.by_id and (known := tracker.rank(request_id)) is not None:
            raise DuplicateReservationError(request_id, *astuple(known))
        if request_id in self._waiting.tickets:
            raise DuplicateReservationError(request_id)
        if len(tracker.by_id) - tracker.foreign_count >= limit:
            raise TooManyReservationsError(limit)
        return request_id

    def select_and_reserve(
        self, request: SelectRequest, prompt: Prompt, now_s: float, waited_s: float = 0.0
    ) -> tuple[Placement, list[Effect]]:
        """Choose a rank and book it; see `RouterCore`. `waited_s`: its time in the queue."""
        request_id = self.bookable_id(request.request_id)
        try:
            placement = self._placer.place(request, prompt, now_s, waited_s)
        except SloNotMetError as error:
            self._tracker.promises.refuse(request.scope, error.policy_class)
            raise
        choice, hashed, worker = placement.choice, placement.prompt, placement.worker
        table, row = choice.table, choice.table.values[choice.index]
        overlap = (int(row[OVERLAP_DEVICE]), int(row[OVERLAP_REMOTE]))
        rank, tracking, tenant = table.ranks[choice.index], placement.tracking, request.tenant
        booked = (request_id, table.scope, rank, worker, tenant, prompt, hashed, overlap, tracking)
        effects = self._book(request, *booked, now_s)
        if placement.promise is not None:
            self._tracker.promises.give(request_id, rank, placement.promise, now_s)
        return placement, effects

    def reserve(
        self, request: ReserveRequest, prompt: Prompt, now_s: float
    ) -> tuple[WorkerAnnouncement, list[Effect]]:
        """Book a prompt on the rank that the caller chose; see `RouterCore`."""
        request_id = self.bookable_id(request.request_id)
        rank, scope = Rank(request.worker_id, request.dp_rank), request.scope
        worker = self._placer.find_worker(scope, rank)
        hashed = prompt.hashed(worker.identity)
        held = self._placer.resumable(scope, hashed).get(rank, NO_OVERLAP)
        overlap, tracking = (held.device, held.remote), self._placer.tracking(request)
        booked = (request_id, scope, rank, worker, None, prompt, hashed, overlap, tracking)
        effects = self._book(request, *booked, now_s)
        if request.slo_ttft_ms is not None or request.slo_tpot_ms is not None:
            self._tracker.promises.give(request_id, rank, _unpredicted(request), now_s)
        return worker, effects

    def adopt_reservations(self, handed_over: HandedOver, now_s: float) -> list[Effect]:
        """Book the reservations of a router that stops, and confirm each to it.

        Reservations on ranks unknown here are skipped. Those that this router has already stay as
        they are, and are confirmed too.
        """
        effects: list[Effect] = []
        for each in handed_over.reservations:
            if each.request_id in self._waiting:
                continue
            if each.request_id in self._tracker or self._foreign.adopt_reservations(
                handed_over.router_id, each, now_s
            ):
                freed = ProgressTold(each.request_id, ReservationFreed())
                effects.append(TellReplica(handed_over.router_id, freed))
        return effects

    # Each of these applies a caller's report, here or at the routers that have booked the request.
    # Raises ReservationNotFoundError.

    def prefill_complete(
        self, request_id: str, usage: PromptUsage | None, now_s: float, *, in_batch: bool = False
    ) -> list[Effect]:
        """Record that a prompt is computed."""
        if request_id not in self._tracker.by_id:
            return self._pass_on(request_id, PrefillCompleted(usage, in_batch))
        effects = [] if usage is None else self._usage.compare(request_id, usage, now_s)
        self._tracker.prefill_complete(request_id, now_s, in_batch=in_batch)
        return effects

    def output_block(
        self, request_id: str, decay_fraction: float | None, now_s: float, *, in_batch: bool = False
    ) -> list[Effect]:
        """Record that the output of a request grew by a block."""
        if request_id not in self._tracker.by_id:
            return self._pass_on(request_id, OutputBlockAdded(decay_fraction, in_batch))
        if self._settings.tracking.counts_output:
            self._tracker.add_output_blocks(request_id, 1, decay_fraction, now_s, in_batch=in_batch)
        else:
            self._tracker.progress(request_id, now_s)
        return []

    def free(
        self,
        request_id: str,
        usage: PromptUsage | None,
        now_s: float,
        *,
        is_passed_on: bool = False,
    ) -> list[Effect]:
        """End a request, at all routers that have booked it.

        `is_passed_on`: another router reports it, and reports it to the others itself.
        """
        if request_id not in self._tracker.by_id:
            return self._pass_on(request_id, ReservationFreed(usage))
        effects: list[Effect] = []
        cached_tokens = output_tokens = None
        if usage is not None:
            effects = self._usage.compare(request_id, usage, now_s)
            cached_tokens = usage.cached_tokens if usage.is_cached_told else None
            output_tokens = usage.output_tokens
        self._tracker.free(request_id, now_s, cached_tokens, output_tokens)
        if request_id in self._foreign.replicas.booked and not is_passed_on:
            effects += self._foreign.pass_on(request_id, ReservationFreed())
        return effects

    def apply_peer_progress(
        self, request_id: str, progress: CallerTold, now_s: float
    ) -> list[Effect]:
        """Apply a report that another router forwards; reports on others' requests are ignored.

        The end of a request is not forwarded again: routers would send it back without end.
        """
        if request_id not in self._tracker.by_id:
            return []
        match progress:
            case PrefillCompleted(usage, in_batch):
                return self.prefill_complete(request_id, usage, now_s, in_batch=in_batch)
            case OutputBlockAdded(decay, in_batch):
                return self.output_block(request_id, decay, now_s, in_batch=in_batch)
            case ReservationFreed(usage):
                return self.free(request_id, usage, now_s, is_passed_on=True)

    def _pass_on(self, request_id: str, progress: CallerTold) -> list[Effect]:
        effects = self._foreign.pass_on(request_id, progress)
        if not effects:
            raise ReservationNotFoundError(request_id)
        return effects

    def _book(
        self,
        request: SelectRequest | ReserveRequest,
        request_id: str,
        scope: Scope,
        rank: Rank,
        worker: WorkerAnnouncement,
        tenant: str | None,
        prompt: Prompt,
        hashed: HashedPrompt,
        overlap: tuple[int, int],
        tracking: TrackedParts,
        now_s: float,
    ) -> list[Effect]:
        """Book the counted part of a request, and take it over from other routers that booked it.

        `overlap`: leading blocks that the rank has on its device, and on any tier.
        """
        found_by, lora_name = hashed.sequence_hashes, request.lora_name
        expectation = ExpectedUsage(
            scope,
            tenant,
            found_by,
            overlap[1],
            bool(request.cache_salt or lora_name),
            prompt.caller_hashes is not None,
            bool(request.block_mm_infos),
        )
        footprint = hashed.footprint(overlap[0], request.expected_output_tokens, expectation)
        if tracking != COUNT_ALL:
            footprint = tracking.counted(footprint)
        if lora_name is not None:
            self._placer.gate.served(rank, lora_name, worker.labels)
        self._tracker.book(request_id, rank, footprint, now_s)
        self._placer.note_placed(scope, rank)
        foreign = self._foreign
        if foreign.herd.others:
            foreign.herd.note_ours(rank, footprint, now_s)
        if self._predictions.are_made:
            self._predictions.insert(scope, rank, found_by, now_s)
        if request_id not in foreign.replicas.booked:
            return []
        return foreign.pass_on(request_id, ReservationFreed())


def _unpredicted(request: ReserveRequest) -> Promise:
    """Return the objectives of a request on a rank that its caller chose."""
    ttft_ms, tpot_ms = request.slo_ttft_ms, request.slo_tpot_ms
    most_ttft_s, most_tpot_s = (inf if each is None else each / 1e3 for each in (ttft_ms, tpot_ms))
    return Promise(request.scope, CALLERS_CLASS, most_ttft_s, most_tpot_s)
