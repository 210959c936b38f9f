"""All state of a router, and `handle`, the one entry for commands that change it.

The core is synchronous and pure: time and randomness are arguments, and nothing awaits. So no two
requests choose by the same stale load, and a simulator can drive the same object.

    messages ──▶ handle(Apply), handle(ApplyLoad), … ──▶ Fleet, TrustedIndex
    requests ──▶ handle(Submit), handle(Free), …     ──▶ scheduler over both, Tracker
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any, Protocol

import numpy as np
from msgspec.structs import asdict, replace

from router.accuracy.accuracy import AccuracyMonitor
from router.core import commands
from router.core.admission import Admission, AdmissionController
from router.core.capacity import CapacityMonitor
from router.core.commands import AnyHandled, Command, Handled, R
from router.core.effects import (
    AdmitWaiting,
    Effect,
    RefuseWaiting,
    RequestCheckpoint,
    ReservationExpired,
)
from router.core.fleet import Fleet
from router.core.membership import Membership
from router.core.placement import Explained, Placement
from router.core.placer import Placer
from router.core.rank_status import RankStatus
from router.core.remote_reservations import RemoteReservations
from router.core.reservations import Reservations
from router.core.settings import CoreSettings
from router.core.usage_check import UsageCheck
from router.core.worker_reports import WorkerReports
from router.errors import InvalidFieldError
from router.indexer.base import HeldSlice, Indexer, IndexMode, OverlapScores
from router.indexer.dumps import IndexDump, RankBlocks, dumped_blocks
from router.indexer.predictions import Predictions
from router.indexer.trusted_index import TrustedIndex
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.replicas import (
    HandedOver,
    ProgressTold,
)
from router.protocol.requests import (
    ConfigOverride,
    PotentialLoadsRequest,
    PromptRequest,
    SelectRequest,
)
from router.protocol.values import Identity, Rank, Scope
from router.scheduler.eligibility import Eligibility
from router.scheduler.objectives import ObjectiveRules
from router.scheduler.policy.registry import Policies
from router.scheduler.predictor.predictor import Predictor
from router.scheduler.queue.errors import WithdrawnError
from router.scheduler.queue.waiting_room import WaitingRoom
from router.scheduler.selector import Selector
from router.scheduler.settings import TrustWeights
from router.scheduler.terms import TermTable
from router.sequence.active.prompt import HashedPrompt, Prompt, prepare
from router.sequence.active.tracker import Tracker
from router.sequence.rank_table import RankTable

SWEEP_SUB_TABLES = 64
"""Sub-tables swept without a pause."""


class Handle(Protocol):
    """A function that executes the commands of a core."""

    def __call__(self, command: Command[R], now_s: float, /) -> Handled[R]:
        """Execute a command. Returns its reply, and the effects to carry out."""


class RouterCore:
    """The state of a router, and its commands.

    `handle`: executes a command at a time, and returns its reply and effects. All other members
    may be read, not changed; none can be replaced.
    """

    handle: Handle
    __slots__ = (
        "_admission",
        "_handlers",
        "_membership",
        "_placer",
        "_reports",
        "_reservations",
        "_settings",
        "_standing",
        "_usage",
        "capacity",
        "fleet",
        "foreign",
        "handle",
        "held_blocks",
        "index",
        "naming",
        "predictions",
        "predictor",
        "ranks",
        "tracker",
        "trust",
        "trusts",
        "waiting",
    )

    def __init__(
        self,
        settings: CoreSettings,
        make_indexer: Callable[[], Indexer],
        rng: Random,
        selectors: Iterable[Selector] | None = None,
    ) -> None:
        """Initialise an empty core.

        `selectors`: the available policies; None: those that come with the router. Raises
        ConfigError if the settings name another one.
        """
        self._settings = settings
        self.fleet = Fleet(settings.liveness)
        self.naming = settings.naming
        self.index = TrustedIndex(make_indexer, settings.mode, self.naming.scheme)
        self.predictions = Predictions(settings.estimates, self.index.keeps_prompts)
        self.ranks = RankTable()
        self.tracker = Tracker(settings.reservation_ttl_s, self.ranks)
        self.predictor = Predictor(self.ranks)
        booked_on = (self.fleet, self.ranks, self.tracker)
        from_zero = settings.queueing.from_zero
        self.capacity = CapacityMonitor(settings.capacity, from_zero, *booked_on)
        self.waiting = WaitingRoom(settings.queueing)
        self.foreign = RemoteReservations(
            settings.router_id,
            self.fleet,
            self.predictions,
            self.ranks,
            self.tracker,
            settings.max_reservations,
        )
        self._standing = RankStatus(
            self.ranks, self.fleet, self.index, self.predictions, self.trust_weights
        )
        self.trust, self.trusts = self._standing.trust, self._standing.trusts
        self.held_blocks = self._standing.held_blocks
        known = (self.fleet, self.index, self.predictions, self.ranks, self.tracker)
        objectives = ObjectiveRules(self.waiting.policies, settings.queueing.slo_unmet)
        self._placer = Placer(settings, *known, self.foreign.herd, objectives, selectors, rng)
        stores = (*known, self.predictor, self.foreign, self._standing)
        self._membership = Membership(*stores, self.gate)
        self._reports = WorkerReports(
            self.fleet,
            self.index,
            self.tracker,
            self.predictor,
            self._standing,
            self._membership,
            rng,
        )
        self._usage = UsageCheck(self.tracker, self.index)
        booked = (self.tracker, self.foreign, self.predictions, self.waiting)
        self._reservations = Reservations(settings, self._placer, *booked, self._usage)
        parts = (self._placer, self._reservations, self.waiting)
        self._admission = AdmissionController(self.fleet, *parts, self.capacity)
        self._handlers = self._table()
        self.handle = self._execute  # the last one: from now on nothing is replaced

    def __setattr__(self, name: str, value: object) -> None:
        """Raise AttributeError once the core is built: its parts hold on to each other."""
        if hasattr(self, "handle"):
            raise AttributeError(f"{name}: the parts of a core cannot be replaced")
        object.__setattr__(self, name, value)

    def wrap(self, around: Handle) -> None:
        """Pass every command to a function around `handle`, which calls that: a recorder."""
        object.__setattr__(self, "handle", around)

    @property
    def settings(self) -> CoreSettings:
        """The settings in force."""
        return self._settings

    @property
    def gate(self) -> Eligibility:
        """The filters over candidates, and the busy ranks; read-only."""
        return self._placer.gate

    @property
    def policies(self) -> Policies:
        """The available policies; read-only."""
        return self._placer.policies

    @property
    def closed_loop(self) -> AccuracyMonitor:
        """The comparison of engines' usage reports with the predictions; read-only."""
        return self._usage.closed_loop

    @property
    def trust_weights(self) -> TrustWeights:
        """The weights of an overlap, by the trust in it."""
        return self._settings.policy.trust_weights

    @property
    def scopes_in_waiting(self) -> list[Scope]:
        """The known scopes without any worker, if their requests wait for one."""
        return self.capacity.without_workers if self.waiting.limits.no_worker_wait_s else []

    @property
    def may_wait_for_workers(self) -> bool:
        """True if requests of some scope wait where it has no schedulable worker."""
        return self.waiting.limits.no_worker_wait_s > 0 and self.capacity.knows_any

    @property
    def reads_events(self) -> bool:
        """True if the index follows the engines' events."""
        return self._settings.mode is IndexMode.EVENTS

    # ── Reads ────────────────────────────────────────────────────────────────────────────────────

    def may_choose(self, scope: Scope, rank: Rank) -> bool:
        """Return whether a rank of this scope may be chosen, load aside."""
        return rank in self._placer.schedulable(scope)

    def busy_ranks(self, scope: Scope) -> list[Rank]:
        """Return the busy ranks of a scope, which get no requests for now. O(ranks)."""
        candidates = self._placer.schedulable(scope)
        busy = self.gate.busy(candidates, self.gate.thresholds(scope.model_name))
        return [candidates.ranks[position] for position in np.flatnonzero(busy).tolist()]

    def identities(self, scope: Scope) -> Sequence[Identity]:
        """Return the identities under which a prompt of this scope has to be hashed."""
        return self._placer.schedulable(scope).identities

    def hashed(self, request: PromptRequest) -> Prompt:
        """Return a request's prompt, hashed for its scope. Raises InvalidFieldError. O(tokens)."""
        return prepare(request, self.identities(request.scope), naming=self.naming)

    def match(self, scope: Scope, prompt: HashedPrompt) -> OverlapScores:
        """Return the cached prefix of every rank of a scope."""
        return self._placer.overlaps(scope, prompt)

    def resumable(self, scope: Scope, prompt: HashedPrompt) -> OverlapScores:
        """Return the `match`, cut on hybrid ranks to where the prompt can be resumed."""
        return self._placer.resumable(scope, prompt)

    def explain(self, request: SelectRequest, placement: Placement) -> Explained:
        """Explain why a request was placed there. O(candidates)."""
        return self._placer.explain(request, placement)

    def counts_prompt(self, request: PotentialLoadsRequest) -> bool:
        """Return whether the tokens left to compute would count as load."""
        return self._placer.tracking(request).prefill_tokens

    def weigh(self, request: PotentialLoadsRequest, prompt: Prompt, now_s: float) -> TermTable:
        """Return the terms of every rank of a scope that may be chosen; there may be none."""
        return self._placer.weigh(request, prompt, now_s)

    def place_under(
        self, policy: str, request: SelectRequest, prompt: Prompt, now_s: float, rng: Random
    ) -> Placement:
        """Return where another policy would place a request; only that policy's state changes.

        Raises NoEndpointsError, WorkersOverloadedError, SloNotMetError.
        """
        override = replace(request.router_config_override or ConfigOverride(), policy=policy)
        asked = replace(request, router_config_override=override)
        return self._placer.place(asked, prompt, now_s, rng=rng)

    def dump(self) -> Iterator[tuple[Scope, RankBlocks]]:
        """Yield all held blocks by scope, rank and tier; estimated ones of ranks without events."""
        return dumped_blocks(IndexDump(self.index.event_ids(), list(self.dump_slices())))

    def dump_slices(self) -> Iterator[tuple[Scope, HeldSlice]]:
        """Yield all held blocks in slices, between which the index may change; see `IndexDump`."""
        yield from self.index.dump_slices()
        yield from self.predictions.dump_slices()

    # ── Handlers of the commands ─────────────────────────────────────────────────────────────────

    def _execute(self, command: Command[R], now_s: float) -> Handled[R]:
        return self._handlers[type(command)](command, now_s)

    def _table(self) -> dict[type, Callable[[Any, float], AnyHandled]]:
        """Return the handler of each command."""
        return self._reports.handlers() | {
            commands.UpsertWorker: self._upsert,
            commands.UpsertRegistered: self._upsert,
            commands.UpsertImplicit: self._upsert,
            commands.RemoveWorker: self._remove,
            commands.OrderWorker: self._order,
            commands.SetProblem: self._set_problem,
            commands.SetSourceFault: self._set_source_fault,
            commands.SetCaution: self._set_caution,
            commands.ApplyPeer: self._apply_peer,
            commands.SetBusyThresholds: self._set_busy_thresholds,
            commands.Reconfigure: self._reconfigure,
            commands.Tick: self._tick,
            commands.Tidy: self._tidy,
            commands.Select: self._select,
            commands.SelectAndReserve: self._book,
            commands.Submit: self._submit,
            commands.Reserve: self._reserve,
            commands.Admit: self._admit,
            commands.Withdraw: self._withdraw,
            commands.PrefillComplete: self._prefill_complete,
            commands.OutputBlock: self._output_block,
            commands.Free: self._free,
        }

    def _upsert(self, command: commands.Upsert, now_s: float) -> Handled[None]:
        self._membership.upsert_worker(command.announcement, now_s)
        return None, []

    def _remove(self, command: commands.RemoveWorker, _: float) -> Handled[None]:
        gone = self._membership.remove_worker(command.worker_id, command.reason)
        return None, [*gone, *self._admission_effects()] if gone else []

    def _order(self, command: commands.OrderWorker, _: float) -> Handled[None]:
        self.fleet.order(command.worker_id, command.lifecycle)
        return None, []

    def _set_problem(self, command: commands.SetProblem, _: float) -> Handled[None]:
        self.fleet.set_problem(
            command.worker_id, command.problem, is_unreachable=command.is_unreachable
        )
        return None, []

    def _set_source_fault(self, command: commands.SetSourceFault, now_s: float) -> Handled[None]:
        self._membership.set_fault(command.rank, command.fault, now_s)
        return None, []

    def _set_caution(self, command: commands.SetCaution, now_s: float) -> Handled[None]:
        worker = self.fleet.get(command.worker_id)
        if worker is not None and worker.caution != command.caution:
            self.fleet.set_caution(worker, command.caution)
            for rank in worker.ranks:
                self._standing.note(rank, now_s)
        return None, []

    def _apply_peer(self, command: commands.ApplyPeer, now_s: float) -> Handled[None]:
        message = command.message
        if isinstance(message, HandedOver):
            return None, self._reservations.adopt_reservations(message, now_s)
        if isinstance(message, ProgressTold):
            effects = self._reservations.apply_peer_progress(
                message.request_id, message.told, now_s
            )
        else:
            effects = self.foreign.apply(message, now_s)
        return None, [*effects, *self._admission_effects()]

    def _set_busy_thresholds(self, command: commands.SetBusyThresholds, _: float) -> Handled[None]:
        self.gate.set_thresholds(command.model_name, command.thresholds)
        return None, []

    def _reconfigure(self, command: commands.Reconfigure, now_s: float) -> Handled[None]:
        settings = replace(self._settings, **asdict(command))
        queueing, policies = settings.queueing, settings.queueing.policies
        self._placer.reconfigure(settings, ObjectiveRules(policies, queueing.slo_unmet))
        self._reservations.reconfigure(settings)
        self.waiting.reconfigure(queueing, policies)
        object.__setattr__(self, "_settings", settings)
        self._standing.reweigh(self.trust_weights, now_s)
        return None, self._admission_effects()

    def _tick(self, _: commands.Tick, now_s: float) -> Handled[None]:
        effects = self._membership.remove_silent(now_s)
        effects += [
            ReservationExpired(request_id, rank)
            for request_id, rank in self.tracker.expire(now_s)
            if isinstance(request_id, str)
        ]
        effects += self.foreign.tick(now_s)
        effects += [RequestCheckpoint(*each) for each in self.index.take_wanted_checkpoints(now_s)]
        effects += self._admission.expire(now_s)
        if self._settings.models_prefill or self.tracker.silence.is_usual:
            self.tracker.end_overdue(now_s)
        effects += self._admission_effects()
        self._standing.note_some(now_s)
        self._usage.closed_loop.settle(now_s)
        self.predictor.add_first_tokens(self.tracker.take_first_tokens(), now_s)
        self.capacity.sample(now_s)
        return None, effects

    def _tidy(self, _: commands.Tidy, now_s: float) -> Handled[bool]:
        return self.predictions.expire(now_s) | self.index.sweep(SWEEP_SUB_TABLES), []

    def _select(self, command: commands.Select, now_s: float) -> Handled[Placement]:
        prompt = command.prompt or self.hashed(command.request)
        return self._placer.place(command.request, prompt, now_s), []

    def _book(self, command: commands.SelectAndReserve, now_s: float) -> Handled[Placement]:
        prompt = command.prompt or self.hashed(command.request)
        return self._reservations.select_and_reserve(command.request, prompt, now_s)

    def _submit(self, command: commands.Submit, now_s: float) -> Handled[Placement | int]:
        prompt = command.prompt or self.hashed(command.request)
        if not self.waiting.is_used:
            return self._reservations.select_and_reserve(command.request, prompt, now_s)
        return self._admission.submit(command.request, prompt, now_s)

    def _reserve(self, command: commands.Reserve, now_s: float) -> Handled[WorkerAnnouncement]:
        prompt = command.prompt or self.hashed(command.request)
        return self._reservations.reserve(command.request, prompt, now_s)

    def _admit(self, _: commands.Admit, now_s: float) -> Handled[Admission | None]:
        admission = self._admission.admit(now_s)
        return admission, [] if admission is None else admission.effects

    def _withdraw(self, command: commands.Withdraw, _: float) -> Handled[bool]:
        return self.waiting.withdraw(command.ticket), []

    def _prefill_complete(self, command: commands.PrefillComplete, now_s: float) -> Handled[None]:
        effects = self._reservations.prefill_complete(
            command.request_id, command.usage, now_s, in_batch=command.in_batch
        )
        return None, self._with_admission(effects) if self.waiting.is_used else effects

    def _output_block(self, command: commands.OutputBlock, now_s: float) -> Handled[None]:
        decay_fraction = command.decay_fraction
        if decay_fraction is not None and not 0 <= decay_fraction <= 1:
            raise InvalidFieldError("decay_fraction", str(decay_fraction), "0.0 to 1.0")
        effects = self._reservations.output_block(
            command.request_id, decay_fraction, now_s, in_batch=command.in_batch
        )
        return None, self._with_admission(effects) if self.waiting.is_used else effects

    def _free(self, command: commands.Free, now_s: float) -> Handled[None]:
        request_id = command.request_id
        ticket = self.waiting.tickets.get(request_id)
        if ticket is not None:
            self.waiting.withdraw(ticket)
            return None, [RefuseWaiting(ticket, WithdrawnError(request_id))]
        effects = self._reservations.free(request_id, command.usage, now_s)
        return None, self._with_admission(effects) if self.waiting.is_used else effects

    def _with_admission(self, effects: list[Effect]) -> list[Effect]:
        return [*effects, *self._admission_effects()]

    def _admission_effects(self) -> list[Effect]:
        """Return the effects of a rank that may have room again."""
        return [AdmitWaiting()] if len(self.waiting) else []
