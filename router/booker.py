"""From a placed prompt to its booking.

`Placer` says where a prompt goes, `Bookings` keep what was booked; in between, what is expected of
the prompt is written down, for its engine to be held against.
"""

from router.bookings import Bookings
from router.effects import Effect
from router.indexer.base import NO_OVERLAP
from router.placement import Placement
from router.placer import Placer
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.requests import ReserveRequest, SelectRequest
from router.protocol.values import Rank
from router.sequence.prompt import Prompt, expected


class Booker:
    """Books prompts where `Placer`, or a caller, has placed them."""

    __slots__ = ("_bookings", "_placer")

    def __init__(self, placer: Placer, bookings: Bookings) -> None:
        self._placer = placer
        self._bookings = bookings

    def check_bookable(self, request_id: str | None) -> None:
        """Raises MissingRequestIdError, DuplicateReservationError, TooManyReservationsError."""
        self._bookings.bookable_id(request_id)

    def select_and_reserve(
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement, list[Effect]]:
        """Choose a rank and book it; see `RouterCore`."""
        request_id = self._bookings.bookable_id(request.request_id)
        placement = self._placer.place(request, prompt, now_s)
        rank, overlap_blocks = placement.rank, placement.overlap_blocks
        expected_tokens = request.expected_output_tokens
        found_by = placement.prompt.sequence_hashes
        scope, held_blocks = placement.choice.table.scope, placement.held_blocks
        expectation = expected(request, scope, prompt, found_by, held_blocks, tenant=request.tenant)
        footprint = placement.prompt.footprint(overlap_blocks, expected_tokens, expectation)
        self._note_lora(request.lora_name, rank, placement.worker)
        booked = (footprint, found_by, placement.tracking)
        return placement, self._bookings.book(request_id, scope, rank, *booked, now_s)

    def reserve(
        self, request: ReserveRequest, prompt: Prompt, now_s: float
    ) -> tuple[WorkerAnnouncement, list[Effect]]:
        """Book a prompt on a rank the caller chose; see `RouterCore`."""
        request_id = self._bookings.bookable_id(request.request_id)
        rank, scope = Rank(request.worker_id, request.dp_rank), request.scope
        worker = self._placer.find_worker(scope, rank)
        hashed = prompt.hashed(worker.identity)
        overlap = self._placer.overlaps(scope, hashed).get(rank, NO_OVERLAP)
        found_by = hashed.sequence_hashes
        expectation = expected(request, scope, prompt, found_by, overlap.remote)
        expected_tokens = request.expected_output_tokens
        footprint = hashed.footprint(overlap.device, expected_tokens, expectation)
        self._note_lora(request.lora_name, rank, worker)
        booked = (footprint, found_by, self._placer.tracking(request))
        return worker, self._bookings.book(request_id, scope, rank, *booked, now_s)

    def _note_lora(self, lora_name: str | None, rank: Rank, worker: WorkerAnnouncement) -> None:
        if lora_name is not None:
            self._placer.gate.served(rank, lora_name, worker.labels)
