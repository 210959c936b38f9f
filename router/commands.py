"""The commands of callers, the same over HTTP and NATS.

Adds to the core what is not its business: the clock, another thread for long prompts, metrics, and
the outbox. Between reading and changing the core nothing awaits.
"""

import asyncio
import time
from typing import TypeVar

import numpy as np
from msgspec import Struct, structs
from msgspec.structs import astuple

from router.core import RouterCore
from router.errors import (
    InvalidFieldError,
    MissingRequestIdError,
    SelectionNotFoundError,
    ShadowOffError,
)
from router.explain import NOT_BOOKED, Booking, explain, explain_plain
from router.logged_decisions import LoggedDecision, logged_decision
from router.metrics import RouterMetrics
from router.outbox import Outbox
from router.placement import Placement
from router.placement_errors import NoEndpointsError
from router.plain import PlainRequest
from router.prompts import THREAD_TOKENS, is_short, prepared
from router.protocol.replicas import PromptUsage
from router.protocol.replies import (
    Decision,
    OverlapScoresReply,
    PotentialLoad,
    ReservationReply,
    WorkerLoad,
)
from router.protocol.requests import (
    BookRequest,
    PromptRequest,
    ReserveRequest,
    SelectRequest,
    Usage,
)
from router.protocol.values import Rank, Scope
from router.rank_views import overlap_scores, potential_loads
from router.request_headers import bookable
from router.selections import Selection, SelectionLimits, Selections
from router.sequence.hashing import TokenArray
from router.sequence.prompt import Prompt, prepare
from router.sequence.stages import Stages
from router.shadow import ShadowReport
from router.waiters import Gone, Waiters
from router.watch import Watch, end_of

T = TypeVar("T")


class Wait(Struct, frozen=True, eq=False):
    """A request that waits since then: its ticket, and where it will have been placed. `stages`:
    where it is timed.
    """

    request: SelectRequest
    ticket: int
    future: asyncio.Future[Placement]
    since_s: float
    stages: Stages | None


class Commands:
    """Commands on one core. All raise what the core raises."""

    def __init__(
        self,
        core: RouterCore,
        outbox: Outbox,
        metrics: RouterMetrics,
        watch: Watch | None = None,
        selections: Selections | None = None,
    ) -> None:
        """`selections`: where those are kept that may be reserved."""
        self.core = core
        self._watch = watch or Watch(metrics.decisions)
        self._selections = Selections(SelectionLimits()) if selections is None else selections
        self._outbox = outbox
        self._metrics = metrics
        self._waiters = Waiters(core, outbox.perform, metrics)
        outbox.add_waiters(self._waiters.admit, self._waiters.refuse)

    def is_immediate(self, request: PromptRequest) -> bool:
        """Whether nothing has to be waited for to answer it: then `select_now` and its like may be
        called, which do what `select` and its like do.
        """
        return is_short(request)

    async def select(self, request: SelectRequest) -> Decision:
        """Choose a rank; books nothing."""
        stages = self._watch.begin()
        return self._select(request, await self._prepare(request, stages), stages)

    def select_now(self, request: SelectRequest) -> Decision:
        """`select` of an immediate request."""
        stages = self._watch.begin()
        return self._select(request, self._prepare_now(request, stages), stages)

    def select_plain(
        self, request: PlainRequest, request_id: str | None, tokens: TokenArray
    ) -> Decision | None:
        """`select` of a request that asks for a rank only, in half the time. `request_id`: where
        its words say none. None, and nothing has changed: `select` has to find out. Raises nothing.
        """
        if len(tokens) > THREAD_TOKENS or not self._watch.begin_plain():
            return None
        now_s = time.monotonic()
        placement = self.core.select_plain(request, tokens, now_s)
        if placement is None:
            return None
        decision = explain_plain(self.core, request.request_id or request_id, placement, now_s)
        self._watch.decided_plain("select", placement.worker.role, decision)
        return decision

    async def select_and_reserve(
        self, request: SelectRequest, gone: Gone | None = None
    ) -> Decision:
        """Choose a rank and book it; if all are busy, once one is free.

        `gone` returns when the caller has hung up; then this raises ClientGoneError.
        """
        submitted = await self.submit(request)
        if isinstance(submitted, Decision):
            return submitted
        del request  # with all its tokens, which may be many in a long queue
        return await self.decision(submitted, gone)

    async def submit(self, request: SelectRequest) -> Decision | Wait:
        """Choose a rank and book it, or have the request wait; it has an id from here on."""
        request = bookable(request)
        stages = self._watch.begin()
        return self._submit(request, await self._prepare(request, stages), stages)

    def submit_now(self, request: SelectRequest) -> Decision | Wait:
        """`submit` of an immediate request."""
        request = bookable(request)
        stages = self._watch.begin()
        return self._submit(request, self._prepare_now(request, stages), stages)

    def drain(self) -> None:
        """Refuse whoever waits, now and from now on: they have time to go elsewhere."""
        self._waiters.close()

    async def decision(self, wait: Wait, gone: Gone | None = None) -> Decision:
        """Where a waiting request was placed, once it is."""
        request_id = wait.request.request_id or ""
        placement = await self._waiters.placement(request_id, wait.ticket, wait.future, gone)
        decision = self._booked(wait.request, placement, wait.stages)
        return structs.replace(decision, waited_s=round(time.monotonic() - wait.since_s, 6))

    async def reserve(self, asked: BookRequest) -> ReservationReply:
        """Book a rank that the caller chose, or what was selected.

        Raises SelectionNotFoundError, and what the core raises.
        """
        if asked.worker_id is not None:
            request = asked.at(Rank(asked.worker_id, asked.dp_rank))
            return self._reserve(request, await self._prepare(request))
        selection_id = asked.selection_id or asked.request_id
        if selection_id is None:
            raise MissingRequestIdError
        return await self._reserve_selected(asked.scope, selection_id)

    async def _reserve_selected(self, scope: Scope, selection_id: str) -> ReservationReply:
        selection = self._selections.find((scope, selection_id), time.monotonic())
        if selection is None:
            raise SelectionNotFoundError(selection_id, *astuple(scope))
        request = selection.request
        reply = self._reserve(request, self._prepare_now(request))
        self._selections.reserved((scope, selection_id))
        return reply

    def _reserve(self, request: ReserveRequest, prompt: Prompt) -> ReservationReply:
        worker, effects = self.core.reserve(request, prompt, time.monotonic())
        self._outbox.perform(effects)
        request_id = request.request_id or ""
        return ReservationReply(
            selection_id=request_id,
            request_id=request_id,
            model_name=worker.model_name,
            routing_group=worker.routing_group,
            worker_id=worker.worker_id,
            dp_rank=request.dp_rank,
            endpoint=worker.endpoint,
        )

    def prefill_complete(
        self, request_id: str, usage: Usage | None = None, *, in_batch: bool = False
    ) -> None:
        """A booked prompt is computed. `usage`: what its engine says of it, which is held against
        what we had expected, once. `in_batch`: as to `RouterCore.prefill_complete`.
        """
        told = told_usage(usage)
        now_s = time.monotonic()
        self._outbox.perform(self.core.prefill_complete(request_id, now_s, told, in_batch))

    def output_block(
        self, request_id: str, decay_fraction: float | None, *, in_batch: bool = False
    ) -> None:
        """A booked request grew by a block."""
        effects = self.core.output_block(request_id, decay_fraction, time.monotonic(), in_batch)
        self._outbox.perform(effects)

    def free(self, request_id: str, usage: Usage | None = None) -> None:
        """A booked request ended. `usage`: as with `prefill_complete`; streams say it last."""
        told = told_usage(usage)
        self._outbox.perform(self.core.free(request_id, time.monotonic(), told))

    async def potential_loads(self, request: PromptRequest) -> list[PotentialLoad]:
        """The load of every rank, were this prompt placed there. Raises NoEndpointsError."""
        loads = potential_loads(self.core, request, await self._prepare(request), time.monotonic())
        return _served(loads, request)

    async def overlap_scores(self, request: PromptRequest) -> OverlapScoresReply:
        """The cached prefix of every rank. Raises NoEndpointsError."""
        prompt = await self._prepare(request)
        scores = overlap_scores(self.core, request, prompt, time.monotonic())
        _served(scores.workers, request)
        return scores

    async def look(self, request: SelectRequest, candidates: int) -> LoggedDecision:
        """Where a prompt would go, and why, of so many candidates: books nothing, and neither
        counts nor binds a session.
        """
        prompt = await self._prepare(request)
        now_s = time.monotonic()
        placement = self.core.select(request, prompt, now_s)
        return logged_decision(self.core, request, placement, candidates, time.time(), now_s)

    def shadow_report(self) -> ShadowReport:
        """How our choices would have differed. Raises ShadowOffError: here they are followed."""
        raise ShadowOffError

    async def _prepare(self, request: PromptRequest, stages: Stages | None = None) -> Prompt:
        core = self.core
        return await prepared(request, core.identities(request.scope), stages, core.naming)

    def _prepare_now(self, request: PromptRequest, stages: Stages | None = None) -> Prompt:
        """Tokens that nobody times are hashed where they are looked for: see `short_cut.py`."""
        core, is_hashed = self.core, stages is not None or request.token_ids is None
        identities = core.identities(request.scope) if is_hashed else ()
        return prepare(request, identities, stages, core.naming)

    def _select(self, request: SelectRequest, prompt: Prompt, stages: Stages | None) -> Decision:
        now_s = time.monotonic()
        placement = self.core.select(request, prompt, now_s)
        return self._selected(request, placement, stages, now_s)

    def _submit(
        self, request: SelectRequest, prompt: Prompt, stages: Stages | None
    ) -> Decision | Wait:
        now_s = time.monotonic()
        submitted, effects = self.core.submit(request, prompt, now_s)
        if isinstance(submitted, Placement):
            self._outbox.perform(effects)
            end_of(stages)
            return self._booked(request, submitted, stages)
        future = self._waiters.expect(submitted)
        self._outbox.perform(effects)
        return Wait(structs.replace(request, token_ids=None), submitted, future, now_s, stages)

    def _selected(
        self, request: SelectRequest, placement: Placement, stages: Stages | None, now_s: float
    ) -> Decision:
        """A selection is kept where it has an id, and says how loaded its rank is where asked."""
        end_of(stages)
        decision = self._decided("select", request, placement, stages)
        if request.selection_id is None and not request.advisory:
            return decision
        if request.selection_id is not None:
            selection = Selection.of(request, placement.rank, placement.prompt.public_hashes)
            self._selections.keep((request.scope, request.selection_id), selection, now_s)
        load = self._worker_load(placement) if request.advisory else None
        return structs.replace(decision, selection_id=request.selection_id, worker_load=load)

    def _worker_load(self, placement: Placement) -> WorkerLoad:
        active, worker = self.core.tracker.active(placement.rank), placement.worker
        return WorkerLoad(
            active.active_prefill_tokens,
            worker.max_num_batched_tokens,
            worker.total_kv_blocks,
            active.active_blocks,
        )

    def _booked(
        self, request: SelectRequest, placement: Placement, stages: Stages | None
    ) -> Decision:
        hashes = placement.prompt.public_hashes.view(np.int64).tolist()
        booking = Booking(request.request_id, hashes, placement.tracking.prefill_tokens)
        return self._decided("select_and_reserve", request, placement, stages, booking)

    def _decided(
        self,
        command: str,
        request: SelectRequest,
        placement: Placement,
        stages: Stages | None,
        booking: Booking = NOT_BOOKED,
    ) -> Decision:
        """`stages`, which has ended: None for a request that was not timed."""
        decision = explain(self.core, request, placement, time.monotonic(), booking)
        self._watch.decided(command, request, placement, decision, stages)
        return decision


def _served(ranks: list[T], request: PromptRequest) -> list[T]:
    """The ranks of a scope, if it has any. Raises NoEndpointsError."""
    if not ranks:
        model_name, routing_group = request.model_name, request.routing_group
        raise NoEndpointsError(model_name, routing_group, "no schedulable workers")
    return ranks


def told_usage(usage: Usage | None) -> PromptUsage | None:
    """A usage that can be true. Raises InvalidFieldError."""
    if usage is None:
        return None
    if usage.cached > usage.prompt_tokens:
        allowed = f"at most prompt_tokens, {usage.prompt_tokens}"
        raise InvalidFieldError("usage.cached_tokens", str(usage.cached), allowed)
    return PromptUsage(usage.prompt_tokens, usage.cached, usage.is_cached_told)
