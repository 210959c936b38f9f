"""Requests of Dynamo's routers, read from their replica sync: compared, then reserved.

    AddRequest            ─▶ our own selection ─▶ Shadow; then reserved where they placed it
    MarkPrefillCompleted  ─▶ prefill complete
    Free                  ─▶ free

An AddRequest contains the sequence hashes of the prompt's full blocks, computed by the same rule as
ours. Exceptions are Dynamo routers configured not to track blocks (no hashes), to assume no reuse
(random hashes) or to key them (unknown hashes): then no block is ever found cached. 1.0.2 also
sends ISL and overlap; with 1.6.1 both follow from the prefill tokens that it expects.
"""

from msgspec import Struct

from router.core.commands import Free, PrefillComplete, Reserve, Select
from router.core.core import RouterCore
from router.core.errors import TooManyReservationsError
from router.core.views.shadow import Shadow, reserved_at
from router.discovery.dynamo.fleet.fleet import DynamoFleet
from router.discovery.dynamo.fleet.messages import AddRequest, SequenceEvent
from router.discovery.dynamo.fleet.settings import DynamoSettings
from router.errors import WorkerNotFoundError
from router.protocol.requests import SelectRequest
from router.protocol.values import Rank
from router.scheduler.errors import NoEndpointsError
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError
from router.sequence.active.prompt import MAX_PROMPT_TOKENS, prepare


class IncumbentCounts(Struct):
    """Totals of the messages of Dynamo's routers, by outcome."""

    booked: int = 0
    prefill_completed: int = 0
    freed: int = 0
    unknown_ranks: int = 0
    """Placed on a rank that is not known here."""
    unknown_requests: int = 0
    """Completed or freed without a known reservation: both routers and workers publish these."""
    not_booked: int = 0
    """Reserved already, or beyond the limit of reservations."""
    untracked: int = 0
    """Without block hashes, or with an implausible length."""
    other_block_size: int = 0
    """With more or fewer hashes than a prompt of its length has blocks."""


class Incumbents:
    """The requests of one Dynamo fleet."""

    __slots__ = ("_core", "_fleet", "_settings", "_shadow", "counts")

    def __init__(
        self, core: RouterCore, fleet: DynamoFleet, shadow: Shadow, settings: DynamoSettings
    ) -> None:
        self._core = core
        self._fleet = fleet
        self._shadow = shadow
        self._settings = settings
        self.counts = IncumbentCounts()

    def take(self, event: SequenceEvent, now_s: float) -> None:
        """Apply a published change of a request."""
        change = event.change
        try:
            if isinstance(change, AddRequest):
                self._add(event.request_id, event.rank, change, now_s)
            elif change == "Free":
                self._core.handle(Free(event.request_id), now_s)
                self.counts.freed += 1
            else:
                self._core.handle(PrefillComplete(event.request_id), now_s)
                self.counts.prefill_completed += 1
        except ReservationNotFoundError:
            self.counts.unknown_requests += 1
        except (NoEndpointsError, WorkerNotFoundError):
            self.counts.unknown_ranks += 1
        except (DuplicateReservationError, TooManyReservationsError):
            self.counts.not_booked += 1

    def _add(self, request_id: str, rank: Rank, added: AddRequest, now_s: float) -> None:
        isl_tokens = self._isl_tokens(added)
        if added.token_sequence is None or isl_tokens > MAX_PROMPT_TOKENS:
            self.counts.untracked += 1
            return
        if len(added.token_sequence) != isl_tokens // self._settings.block_size:
            self._complain_of_block_size(len(added.token_sequence), isl_tokens)
            return
        request = SelectRequest(
            request_id=request_id,
            model_name=self._settings.model_name,
            routing_group=self._settings.routing_group,
            allowed_worker_ids=self._fleet.worker_ids,
            sequence_hashes=added.token_sequence,
            isl_tokens=isl_tokens,
            expected_output_tokens=added.expected_output_tokens,
        )
        prompt = prepare(request, (), naming=self._core.naming)
        placement = self._core.handle(Select(request, prompt), now_s)[0]
        claimed = self._claimed_overlap_blocks(added, isl_tokens)
        self._shadow.compare(self._core, request, placement, rank, "bus", now_s, claimed)
        # The effects for other routers are dropped: these routers read Dynamo's messages too.
        self._core.handle(Reserve(reserved_at(request, rank), prompt), now_s)
        self.counts.booked += 1
        if not added.track_prefill_tokens:
            self._core.handle(PrefillComplete(request_id), now_s)

    def _complain_of_block_size(self, blocks: int, isl_tokens: int) -> None:
        self.counts.other_block_size += 1
        self._fleet.complaints.add(
            f"a prompt of {isl_tokens} tokens has {blocks} blocks for Dynamo's router: "
            f"dynamo_block_size is not {self._settings.block_size}, as configured"
        )

    def _isl_tokens(self, added: AddRequest) -> int:
        """Return the ISL; its remainder is the prefill's, since cache hits are whole blocks."""
        if added.isl is not None:
            return added.isl
        full_tokens = len(added.token_sequence or ()) * self._settings.block_size
        if added.prefill_load_hint is None:
            return full_tokens
        to_compute = added.prefill_load_hint.initial_effective_prefill_tokens
        return full_tokens + to_compute % self._settings.block_size

    def _claimed_overlap_blocks(self, added: AddRequest, isl_tokens: int) -> int | None:
        if added.overlap is not None or added.prefill_load_hint is None:
            return added.overlap
        to_compute = added.prefill_load_hint.initial_effective_prefill_tokens
        return max(isl_tokens - to_compute, 0) // self._settings.block_size
