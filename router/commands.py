"""The commands of callers, the same over HTTP and NATS.

Adds to the core what is not its business: the clock, another thread for long prompts, metrics, and
the outbox. Between reading and changing the core nothing awaits.
"""

import time

from router.core import Placement, RouterCore
from router.errors import InvalidFieldError, ShadowOffError
from router.explain import explain
from router.metrics import RouterMetrics
from router.outbox import Outbox
from router.prompts import prepared
from router.protocol.replies import Decision, OverlapScoresReply, PotentialLoad, ReservationReply
from router.protocol.requests import PromptRequest, ReserveRequest, SelectRequest
from router.sequence.prompt import Prompt
from router.shadow import ShadowReport
from router.views import overlap_scores, potential_loads

REQUEST_ID_HEADER = "x-request-id"


class Commands:
    """Commands on one core. All raise what the core raises."""

    def __init__(self, core: RouterCore, outbox: Outbox, metrics: RouterMetrics) -> None:
        self.core = core
        self._outbox = outbox
        self._metrics = metrics

    async def select(self, request: SelectRequest) -> Decision:
        """Choose a rank; books nothing."""
        started_s = time.perf_counter()
        prompt = await self._prepare(request)
        placement = self.core.select(request, prompt, time.monotonic())
        return self._decided("select", request, placement, started_s)

    async def select_and_reserve(self, request: SelectRequest) -> Decision:
        """Choose a rank and book it."""
        started_s = time.perf_counter()
        prompt = await self._prepare(request)
        placement, effects = self.core.select_and_reserve(request, prompt, time.monotonic())
        self._outbox.perform(effects)
        return self._decided("select_and_reserve", request, placement, started_s)

    async def reserve(self, request: ReserveRequest) -> ReservationReply:
        """Book a rank that the caller chose."""
        prompt = await self._prepare(request)
        worker, effects = self.core.reserve(request, prompt, time.monotonic())
        self._outbox.perform(effects)
        return ReservationReply(
            request_id=request.request_id or "",
            model_name=worker.model_name,
            routing_group=worker.routing_group,
            worker_id=worker.worker_id,
            dp_rank=request.dp_rank,
            endpoint=worker.endpoint,
        )

    def prefill_complete(self, request_id: str) -> None:
        """A booked prompt is computed."""
        self._outbox.perform(self.core.prefill_complete(request_id, time.monotonic()))

    def output_block(self, request_id: str, decay_fraction: float | None) -> None:
        """A booked request grew by a block."""
        effects = self.core.output_block(request_id, decay_fraction, time.monotonic())
        self._outbox.perform(effects)

    def free(self, request_id: str) -> None:
        """A booked request ended."""
        self._outbox.perform(self.core.free(request_id, time.monotonic()))

    async def potential_loads(self, request: PromptRequest) -> list[PotentialLoad]:
        """The load of every rank, were this prompt placed there."""
        return potential_loads(self.core, request, await self._prepare(request), time.monotonic())

    async def overlap_scores(self, request: PromptRequest) -> OverlapScoresReply:
        """The cached prefix of every rank."""
        prompt = await self._prepare(request)
        return overlap_scores(self.core, request, prompt, time.monotonic())

    def shadow_report(self) -> ShadowReport:
        """How our choices would have differed. Raises ShadowOffError: here they are followed."""
        raise ShadowOffError

    async def _prepare(self, request: PromptRequest) -> Prompt:
        return await prepared(request, self.core.identities(request.scope))

    def _decided(
        self, command: str, request: SelectRequest, placement: Placement, started_s: float
    ) -> Decision:
        decision = explain(self.core, request, placement, time.monotonic())
        cached_tokens = decision.predicted_cached_blocks * decision.block_size
        self._metrics.decisions.labels(command).inc()
        self._metrics.prompt_tokens.inc(decision.isl_tokens)
        self._metrics.predicted_cached_tokens.inc(cached_tokens)
        self._metrics.decision_seconds.observe(time.perf_counter() - started_s)
        return decision


def request_id_of(request_id: str | None, header: str | None) -> str | None:
    """A request's id: its own, or the header's. Raises InvalidFieldError for an unfit header."""
    if request_id is not None or header is None:
        return request_id
    if not 1 <= len(header) <= 256:
        raise InvalidFieldError(REQUEST_ID_HEADER, f"{len(header)} characters", "1 to 256")
    return header
