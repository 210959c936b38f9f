"""The commands of callers, the same over HTTP and NATS.

They add to the core what it does not do itself: the clock, another thread for long prompts,
metrics, and the outbox. There is no await between reading and changing the core.

    command, caller ─▶ tenant's ids in ─▶ session's rank in ─▶ core.handle ─▶ effects, metrics
                  reply ◀─ caller's ids ◀─ session bound ◀─ explained, compared ◀─┘
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from inspect import iscoroutine
from typing import Any, TypeVar

from msgspec import Struct, structs
from msgspec.structs import astuple

from router.api.caller_commands import (
    Book,
    CallerCommand,
    OverlapScores,
    PotentialLoads,
    Preview,
    PromptCommand,
    ReadShadow,
)
from router.api.errors import SelectionNotFoundError, ShadowOffError
from router.api.pending_requests import Disconnected, PendingRequests
from router.api.prompt_hashing import THREAD_TOKENS, is_short, prepared
from router.api.request_headers import bookable
from router.api.sessions import MayWait, SessionStep, Steps, begun
from router.api.shadow import ShadowStep
from router.api.splits import SplitStep, with_split
from router.api.tenants import check_precedence, raise_to_caller, to_caller, to_tenant
from router.core.commands import (
    Command,
    Free,
    OutputBlock,
    PrefillComplete,
    Reserve,
    Select,
    Submit,
)
from router.core.core import RouterCore
from router.core.errors import MissingRequestIdError
from router.core.placement import Placement
from router.core.selections import Selection, SelectionLimits, Selections
from router.core.views.decisions import (
    LoggedDecision,
    explain,
    logged_decision,
)
from router.core.views.shadow import ShadowReport
from router.core.views.workers import overlap_scores, potential_loads
from router.errors import InvalidFieldError, KvRouterError
from router.ingest.effect_runner import EffectRunner
from router.observability.decision_observer import DecisionObserver
from router.observability.metrics import RouterMetrics
from router.protocol.replicas import PromptUsage
from router.protocol.replies import (
    Decision,
    LoadForecast,
    OverlapScoresReply,
    ReservationReply,
    SplitChoice,
    WorkerLoad,
)
from router.protocol.requests import (
    PromptRequest,
    ReserveRequest,
    SelectRequest,
    Usage,
)
from router.protocol.values import Rank
from router.runtime.security.caller import ANYBODY, Caller
from router.scheduler.errors import NoEndpointsError
from router.scheduler.ignored import chosen_by_caller, of_loads, selected_before
from router.scheduler.splits import NO_SPLITS, Splits
from router.sequence.active.prompt import Prompt, prepare
from router.sequence.active.stages import SCHEDULING, Stages

C = TypeVar("C", bound=PromptCommand)
T = TypeVar("T")
W = TypeVar("W", Decision, ReservationReply, LoadForecast)


class PendingRequest(Struct, frozen=True, eq=False):
    """A queued request: its ticket, and a future of its placement.

    `since_s`: when it was queued. `stages`: its timing, if it is timed. `split`: see `Decision`.
    """

    request: SelectRequest
    ticket: int
    future: asyncio.Future[Placement]
    since_s: float
    stages: Stages | None
    split: SplitChoice | None = None


class Commands:
    """Commands on one core. Each raises what the core raises.

    `sessions`, `shadow`: steps before and after the core, if the router has them. `splits`: the
    step that chooses among groups. A reload of the configuration may set `shadow`.
    """

    def __init__(
        self,
        core: RouterCore,
        effect_runner: EffectRunner,
        metrics: RouterMetrics,
        watch: DecisionObserver | None = None,
        selections: Selections | None = None,
        *,
        sessions: SessionStep | None = None,
        shadow: ShadowStep | None = None,
        splits: Splits = NO_SPLITS,
    ) -> None:
        """Initialise on a core. `selections`: the store of selections that may be reserved."""
        self.core = core
        self._watch = watch or DecisionObserver(metrics.decisions)
        self._selections = Selections(SelectionLimits()) if selections is None else selections
        self.splits = SplitStep(core, self._selections, splits)
        self._effect_runner = effect_runner
        self._metrics = metrics
        self._sessions = sessions
        self.shadow = shadow
        self._waiters = PendingRequests(core, effect_runner.perform, metrics)
        effect_runner.add_waiters(self._waiters.admit, self._waiters.refuse)
        self._of_prompts: dict[type, Callable[[Any], Any]] = {
            Select: self._place,
            Submit: self._place,
            Book: self._book,
            PotentialLoads: self._potential_loads,
            OverlapScores: self._overlap_scores,
            Preview: self._preview,
        }
        self._others: dict[type, Callable[[Any], Any]] = {
            PrefillComplete: self._report,
            OutputBlock: self._report,
            Free: self._report,
            ReadShadow: self._read_shadow,
        }

    def handle(self, command: CallerCommand, caller: Caller) -> Any:
        """Return the reply to a command, or a coroutine of the reply if it has to wait.

        `Select` and `Submit` reply with a Decision; `Submit` with a PendingRequest if the request
        is queued: its decision follows with `decision`.
        """
        if caller is not ANYBODY:
            check_precedence(command, caller)
        if caller.tenant is not None:
            return self._handle_for_tenant(command, caller)
        other = self._others.get(type(command))
        if other is not None:
            return other(command)
        given: Any = command
        split = None
        if self.splits.splits:
            given, split = self.splits.before(given)
        tokens = given.request.token_ids
        is_long = tokens is not None and len(tokens) > THREAD_TOKENS
        if is_long or (self._sessions is not None and self._sessions.concerns(given)):
            reply = begun(self._steps(given))
        else:
            reply = self._of_prompts[type(command)](given)
        return reply if split is None else with_split(reply, split)

    async def reply_to(self, command: CallerCommand, caller: Caller) -> Any:
        """Return the reply to a command once it is there, as `handle` does."""
        reply = self.handle(command, caller)
        return await reply if iscoroutine(reply) else reply

    async def decision(
        self, wait: PendingRequest, caller: Caller, gone: Disconnected | None = None
    ) -> Decision:
        """Return the decision on a waiting request, once it is placed.

        `gone` returns when the caller has disconnected; then this raises ClientGoneError.
        """
        decision: Decision = await self._later_for(self._placed(wait, gone), caller)
        return decision

    def drain(self) -> None:
        """Refuse all waiting requests, and later ones, so that they have time to go elsewhere."""
        self._waiters.close()

    def _handle_for_tenant(self, command: CallerCommand, caller: Caller) -> Any:
        try:
            reply = self.handle(to_tenant(command, caller), ANYBODY)
        except KvRouterError as error:
            raise_to_caller(error, caller)
        return self._later_for(reply, caller) if iscoroutine(reply) else to_caller(reply, caller)

    def _steps(self, command: PromptCommand) -> Steps[Any]:
        """Execute a command that may wait for another thread, or for a store of sessions."""
        sessions = self._sessions
        if sessions is None:
            return self._of_prompts[type(command)]((yield self._hashed(command)))
        command = yield sessions.before(command)
        reply = self._of_prompts[type(command)]((yield self._hashed(command)))
        instead = yield sessions.after(command, reply)
        if instead is None:
            return reply
        self._report(Free(reply.request_id))
        self._metrics.sessions_moved.inc()
        return self._place((yield self._hashed(instead)))

    async def _later_for(self, reply: Awaitable[Any], caller: Caller) -> Any:
        try:
            return to_caller(await reply, caller)
        except KvRouterError as error:
            raise_to_caller(error, caller)

    def _hashed(self, command: C) -> MayWait[C]:
        """Return a command with its prompt hashed on another thread, if that is long."""
        return command if is_short(command.request) else self._hashed_elsewhere(command)

    async def _hashed_elsewhere(self, command: C) -> C:
        request, core = command.request, self.core
        stages = self._watch.begin() if isinstance(command, Select | Submit) else None
        prompt = await prepared(request, core.identities(request.scope), stages, core.naming)
        return structs.replace(command, prompt=prompt)

    def _prompt(self, request: PromptRequest, stages: Stages | None = None) -> Prompt:
        """Return a prompt. Tokens are hashed at the lookup."""
        core = self.core
        if request.token_ids is not None:
            return Prompt(request, stages, core.naming)
        return prepare(request, core.identities(request.scope), stages, core.naming)

    def _place(self, command: Select | Submit) -> Decision | PendingRequest:
        prompt = command.prompt or self._prompt(command.request, self._watch.begin())
        stages, now_s, shadow = prompt.stages, time.monotonic(), self.shadow
        if isinstance(command, Select):
            command = Select(command.request, prompt)
        else:
            asked = command.request
            command = Submit(bookable(asked) if asked.request_id is None else asked, prompt)
        request = command.request
        given: Command[Any] = command if shadow is None else shadow.before(command)
        reply, effects = self.core.handle(given, now_s)
        if isinstance(reply, int):
            future = self._waiters.expect(reply)
            self._effect_runner.perform(effects)
            kept = structs.replace(request, token_ids=None)
            return PendingRequest(kept, reply, future, now_s, stages)
        if effects:
            self._effect_runner.perform(effects)
        if stages is not None:
            stages.end(SCHEDULING)
        is_booked = isinstance(command, Submit)
        decision = self._decided(request, reply, stages, now_s, is_booked=is_booked)
        if shadow is not None:
            shadow.after(command, reply)
        if not is_booked and (request.selection_id is not None or request.advisory):
            return self._kept(request, prompt, reply, decision, now_s)
        return decision

    async def _placed(self, wait: PendingRequest, gone: Disconnected | None) -> Decision:
        request_id = wait.request.request_id or ""
        placement = await self._waiters.placement(request_id, wait.ticket, wait.future, gone)
        now_s = time.monotonic()
        decision = self._decided(wait.request, placement, wait.stages, now_s, is_booked=True)
        if self._sessions is not None:  # placed once: it is not moved
            bound = self._sessions.bind(wait.request, placement.rank)
            if iscoroutine(bound):
                await bound
        waited_s = round(now_s - wait.since_s, 6)
        return structs.replace(decision, waited_s=waited_s, split=wait.split)

    def _book(self, command: Book) -> ReservationReply:
        asked, override = command.request, command.request.router_config_override
        if asked.worker_id is not None:
            request = asked.at(Rank(asked.worker_id, asked.dp_rank))
            reply = self._reserve(request, command.prompt or self._prompt(request))
            return reply if override is None else self._warned(reply, chosen_by_caller(override))
        selection_id = asked.selection_id or asked.request_id
        if selection_id is None:
            raise MissingRequestIdError
        selection = self._selections.find((asked.scope, selection_id), time.monotonic())
        if selection is None:
            raise SelectionNotFoundError(selection_id, *astuple(asked.scope))
        request = selection.request
        reply = self._reserve(request, self._prompt(request))
        self._selections.reserved((asked.scope, selection_id))
        return reply if override is None else self._warned(reply, selected_before(override))

    def _reserve(self, request: ReserveRequest, prompt: Prompt) -> ReservationReply:
        worker, effects = self.core.handle(Reserve(request, prompt), time.monotonic())
        self._effect_runner.perform(effects)
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

    def _report(self, command: PrefillComplete | OutputBlock | Free) -> None:
        now_s = time.monotonic()
        _, effects = self.core.handle(command, now_s)
        watch = self._watch
        if watch.on_report is not None and command.request_id in watch.followed:
            watch.on_report(command, now_s)
        if effects:
            self._effect_runner.perform(effects)

    def _potential_loads(self, command: PotentialLoads) -> LoadForecast:
        request, override = command.request, command.request.router_config_override
        prompt = command.prompt or self.core.hashed(request)
        loads = potential_loads(self.core, request, prompt, time.monotonic())
        reply = LoadForecast(_served(loads, request))
        return reply if override is None else self._warned(reply, of_loads(override))

    def _overlap_scores(self, command: OverlapScores) -> OverlapScoresReply:
        request = command.request
        prompt = command.prompt or self._prompt(request)
        scores = overlap_scores(self.core, request, prompt, time.monotonic())
        _served(scores.workers, request)
        return scores

    def _preview(self, command: Preview) -> LoggedDecision:
        request, now_s = command.request, time.monotonic()
        prompt = command.prompt or self.core.hashed(request)
        placement, _ = self.core.handle(Select(request, prompt), now_s)
        most = command.candidates
        return logged_decision(self.core, request, placement, most, time.time(), now_s)

    def _read_shadow(self, _: ReadShadow) -> ShadowReport:
        if self.shadow is None:
            raise ShadowOffError
        return self.shadow.report()

    def _kept(
        self,
        request: SelectRequest,
        prompt: Prompt,
        placement: Placement,
        decision: Decision,
        now_s: float,
    ) -> Decision:
        """Keep a selection that has an id; add its rank's load if the request is advisory."""
        if request.selection_id is not None:
            hashes, sent = placement.prompt.public_hashes, prompt.caller_hashes
            selection = Selection.of(request, placement.rank, hashes, sent)
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

    def _decided(
        self,
        request: SelectRequest,
        placement: Placement,
        stages: Stages | None,
        now_s: float,
        *,
        is_booked: bool,
    ) -> Decision:
        """Explain and observe a decision. `stages`: its finished timing; None if not timed."""
        decision = explain(self.core, request, placement, now_s, is_booked=is_booked)
        override = request.router_config_override
        if override is not None:
            may_be_booked = is_booked or request.selection_id is not None
            policies = self.core.policies
            ignored = policies.ignored(decision.policy, override, is_booked=may_be_booked)
            decision = self._warned(decision, ignored)
        if placement.promise is not None:
            ignored = self.core.policies.ignored_objectives(decision.policy, request)
            decision = self._warned(decision, ignored)
        command = "select_and_reserve" if is_booked else "select"
        self._watch.decided(command, request, placement, decision, stages)
        return decision

    def _warned(self, reply: W, ignored: Mapping[str, str]) -> W:
        """Return a reply with the sentences about ignored fields of an override; count these."""
        for field in ignored:
            self._metrics.ignored_overrides.labels(field).inc()
        if not ignored:
            return reply
        return structs.replace(reply, warnings=(*reply.warnings, *ignored.values()))


def _served(ranks: list[T], request: PromptRequest) -> list[T]:
    """Return the ranks of a scope. Raises NoEndpointsError if there are none."""
    if not ranks:
        model_name, routing_group = request.model_name, request.routing_group
        raise NoEndpointsError(model_name, routing_group, "no schedulable workers")
    return ranks


def checked_usage(usage: Usage | None) -> PromptUsage | None:
    """Return a checked usage. Raises InvalidFieldError if it cannot be true."""
    if usage is None:
        return None
    if usage.cached > usage.prompt_tokens:
        allowed = f"at most prompt_tokens, {usage.prompt_tokens}"
        raise InvalidFieldError("usage.cached_tokens", str(usage.cached), allowed)
    told, output_tokens = usage.is_cached_reported, usage.completion_tokens
    return PromptUsage(usage.prompt_tokens, usage.cached, told, output_tokens)
