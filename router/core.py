"""All state of a router, and every command that changes it.

Synchronous and pure: time and randomness are arguments, nothing awaits, so no two requests can
choose on the same stale load, and a simulator can drive the very same object. Commands return their
answer and the effects that the world owes them.

    messages ──▶ apply, apply_load, upsert_worker, … ──▶ Fleet, TrustedIndex
    requests ──▶ select, reserve, free, …            ──▶ scheduler over both, Tracker
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random

import numpy as np
from msgspec import Struct

from router.beacons import Beacons
from router.effects import (
    AdmitWaiting,
    Effect,
    FetchWorker,
    RefuseWaiting,
    RequestCheckpoint,
    ReservationExpired,
    SendBeacon,
    WorkerGone,
)
from router.errors import (
    DuplicateReservationError,
    InvalidFieldError,
    KvRouterError,
    MissingRequestIdError,
    NoEndpointsError,
    RemovedRanks,
    ReservationNotFoundError,
    TooManyReservationsError,
    WorkerNotFoundError,
    WorkersOverloadedError,
)
from router.fleet import Fleet, LivenessLimits, Worker
from router.foreign import ForeignReservations
from router.indexer.approximate import ApproximateLimits
from router.indexer.base import NO_OVERLAP, HeldSlice, Indexer, IndexMode, OverlapScores
from router.indexer.dumps import IndexDump, RankBlocks, dumped_blocks
from router.indexer.event_log import Verdict
from router.indexer.predictions import Predictions
from router.indexer.snapshot import RankSnapshot
from router.indexer.trusted_index import TrustedIndex
from router.protocol.catalogue import Lifecycle, WorkerAnnouncement, WorkerLabels
from router.protocol.events import LogMessage
from router.protocol.loads import LoadReport
from router.protocol.replicas import (
    CallerTold,
    Frame,
    OutputBlockAdded,
    PrefillCompleted,
    ProgressTold,
    ReservationFreed,
    SnapshotPart,
)
from router.protocol.replies import Trust, TrustState
from router.protocol.requests import ConfigOverride, PromptRequest, ReserveRequest, SelectRequest
from router.protocol.values import Identity, Rank, Scope
from router.queue_errors import WithdrawnError
from router.scheduler.busy import BusyThresholds, step_tokens
from router.scheduler.candidates import Candidates
from router.scheduler.gate import Gate, GateSettings, Passed, removed_ranks
from router.scheduler.policies import (
    DEFAULT_POLICY,
    NO_GROUPS,
    Policies,
    builtin_policies,
)
from router.scheduler.policy_classes import PolicyClass
from router.scheduler.predictor import Predictor
from router.scheduler.selector import Choice, Selector
from router.scheduler.settings import PolicySettings, TrustWeights
from router.scheduler.terms import NEW_BLOCKS, OVERLAP_DEVICE, TAINT_FACTOR, TermTable
from router.scheduler.waiting_room import Queueing, WaitingRoom
from router.scheduler.weighing import Weighing
from router.sequence.footprint import Footprint
from router.sequence.prompt import HashedPrompt, Prompt
from router.sequence.rank_table import (
    BLOCK_SIZE,
    CAPACITY_BLOCKS,
    DECODE_BLOCKS,
    DECODE_SIDE,
    EAGLE,
    HELD_BLOCKS,
    MAX_BATCHED_TOKENS,
    PREFILL_TOKENS,
    TRUST_WEIGHT,
    USED_BLOCKS,
    RankTable,
)
from router.sequence.tracker import Tracker
from router.sequence.tracking import Tracking

SWEEP_SUB_TABLES = 64
"""Sub-tables swept without a pause."""

SETTLED_RANKS = 64
"""Restored ranks checked without a pause."""

NOTED_RANKS = 256
"""Ranks whose standing in the table is renewed by a tick: a millisecond."""


class CoreSettings(Struct, frozen=True):
    """What the core needs to know of the configuration."""

    router_id: int
    policy: PolicySettings
    liveness: LivenessLimits
    reservation_ttl_s: float
    max_reservations: int
    mode: IndexMode = IndexMode.EVENTS
    prediction: ApproximateLimits | None = None
    tracking: Tracking = Tracking()
    gate: GateSettings = GateSettings()
    default_policy: str = DEFAULT_POLICY
    group_policies: Mapping[str, str] = NO_GROUPS
    queueing: Queueing = Queueing()


class Placement(Struct, frozen=True):
    """A choice among candidates, with what it was made from."""

    choice: Choice
    worker: WorkerAnnouncement
    prompt: HashedPrompt
    overlaps: OverlapScores

    @property
    def rank(self) -> Rank:
        """The chosen rank."""
        return self.choice.table.ranks[self.choice.index]

    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt on its device."""
        return int(self.choice.table.values[self.choice.index, OVERLAP_DEVICE])

    @property
    def uncached_tokens(self) -> int:
        """Tokens of the prompt that are left to compute."""
        return self.prompt.prefill_tokens(self.overlap_blocks)


class Admission(Struct, frozen=True, eq=False):
    """A request that waited is placed, or refused after all."""

    ticket: int
    request_id: str | None
    isl_tokens: int
    outcome: Placement | KvRouterError
    policy_class: str
    waited_s: float
    effects: list[Effect]


class RouterCore:
    """Owns `fleet`, `foreign`, `gate`, `index`, `predictions`, `predictor`, `ranks`, `tracker` and
    `waiting`, all of which may be read.
    """

    __slots__ = (
        "_beacons",
        "_candidates",
        "_policies",
        "_rng",
        "_settings",
        "_to_note",
        "_weighing",
        "fleet",
        "foreign",
        "gate",
        "index",
        "predictions",
        "predictor",
        "ranks",
        "tracker",
        "waiting",
    )

    def __init__(
        self,
        settings: CoreSettings,
        make_indexer: Callable[[], Indexer],
        rng: Random,
        selectors: Iterable[Selector] | None = None,
    ) -> None:
        """`selectors`: who may be asked to choose; None: those that come with the router. Raises
        ConfigError where the settings name another one.
        """
        self._settings = settings
        self._policies = Policies(
            builtin_policies() if selectors is None else selectors,
            settings.default_policy,
            settings.group_policies,
        )
        self._rng = rng
        self._beacons = Beacons(rng)
        self.fleet = Fleet(settings.liveness)
        self.index = TrustedIndex(make_indexer, settings.mode)
        self.predictions = Predictions(settings.prediction)
        self.ranks = RankTable()
        self.tracker = Tracker(settings.reservation_ttl_s, self.ranks)
        self.gate = Gate(settings.gate, self.ranks)
        self.predictor = Predictor(self.ranks)
        self.foreign = ForeignReservations(
            settings.router_id,
            self.fleet,
            self.tracker,
            self.predictions,
            settings.max_reservations,
        )
        self._weighing = Weighing(self.ranks, self.tracker)
        self.waiting = WaitingRoom(settings.queueing)
        self._candidates: dict[Scope, tuple[int, int, Candidates]] = {}
        self._to_note: list[Rank] = []

    @property
    def trust_weights(self) -> TrustWeights:
        """What an overlap counts for, by the trust in it."""
        return self._settings.policy.trust_weights

    @property
    def reads_events(self) -> bool:
        """Whether the index follows what engines say."""
        return self._settings.mode is IndexMode.EVENTS

    # ── What the bus says ────────────────────────────────────────────────────────────────────────

    def upsert_worker(self, announcement: WorkerAnnouncement, now_s: float) -> None:
        """Add a worker or take over what it announces now. A new life forgets the old one."""
        known = self.fleet.get(announcement.worker_id)
        before = None if known is None else known.announcement
        self.fleet.put(announcement, now_s)
        if announcement == before:
            return
        kept = set() if before is None else self._kept_ranks(before, announcement)
        for rank in before.ranks if before is not None else ():
            if rank not in kept:
                self._forget_rank(rank)
        for rank in announcement.ranks:
            self._note_worker(rank, announcement)
            if rank not in kept:
                self.index.add_rank(rank, announcement.scope, announcement.identity, now_s)
                self.predictor.add(rank, announcement.scope.model_name, now_s)
            self._note_standing(rank, now_s)
            if rank not in kept:
                self.foreign.book_rank(rank, now_s)

    def remove_worker(self, worker_id: int, reason: str) -> list[Effect]:
        """Take a worker out, with index, load and reservations; unknown ones are passed over."""
        worker = self.fleet.get(worker_id)
        if worker is None:
            return []
        self.fleet.remove(worker_id)
        return [self._forget_worker(worker.announcement, reason), *self._woken()]

    def order_worker(self, worker_id: int, lifecycle: Lifecycle | None) -> None:
        """Cordon a worker, drain it, or let it serve again; it need not exist yet."""
        self.fleet.order(worker_id, lifecycle)

    def set_problem(self, worker_id: int, problem: str | None) -> None:
        """Note what keeps anybody from being sent to a worker; None: nothing does any more."""
        self.fleet.set_problem(worker_id, problem)

    def apply(self, message: LogMessage, now_s: float) -> Verdict | None:
        """Apply a message of the event log, or its first slice; None if nobody announced its rank.

        The rest of a long message follows with `apply_slice`, at the latest with the rank's next.
        """
        life_before = self.index.incarnation(message.rank)
        verdict = self.index.apply(message, now_s)
        if verdict is Verdict.NEW_LIFE and life_before is not None:
            self.tracker.drop_rank(message.rank)
        self._note_standing(message.rank, now_s, is_trusted=verdict is Verdict.APPLY)
        return verdict

    def apply_slice(self) -> bool:
        """Apply one more slice of the messages begun; False if there is none."""
        return self.index.apply_slice()

    def begin_fill(self) -> None:
        """The event log is about to be read from its start, and nobody asks before `settle`."""
        self.index.begin_fill()

    def resume(self, each: RankSnapshot, now_s: float) -> bool:
        """Begin to restore a rank, whose log is read on from there; see `TrustedIndex.resume`.

        False also where its events come another way, which goes on from somewhere else.
        """
        rank = each.state.rank
        worker = self.fleet.get(rank.worker_id)
        if worker is not None and worker.announcement.source(rank) is not None:
            return False
        return self.index.resume(each.state, each.blocks, now_s)

    def settle(self, now_s: float) -> bool:
        """Check a few restored ranks, for all that followed is read; False once none is left."""
        return self.index.settle(SETTLED_RANKS, now_s)

    def apply_load(self, report: LoadReport, now_s: float) -> list[Effect]:
        """Take in a load report: a sign of life, a check of the index, a lesson in speed."""
        if not self.fleet.expects(report):
            return [FetchWorker(report.worker_id)]
        if self.fleet.hear(report, now_s):
            self.index.compare(report, self._beacons.as_of_s(report), now_s)
            self.predictor.observe(report, now_s)
            self._note_standing(report.rank, now_s)
        return []

    def apply_peer(
        self, message: Frame | SnapshotPart | ProgressTold, now_s: float
    ) -> list[Effect]:
        """Take in what another router says of its reservations, or was told of one of ours."""
        if not isinstance(message, ProgressTold):
            return [*self.foreign.apply(message, now_s), *self._woken()]
        if message.request_id in self.tracker:  # passed on no further: that would never end
            self._obey(message.request_id, message.told, now_s)
        return self._woken()

    def set_connected(self, connected: bool, now_s: float) -> None:
        """Note whether the bus can be heard at all."""
        self.fleet.set_connected(connected, now_s)

    def stream_lost(self, now_s: float) -> None:
        """Note that the event stream was wiped."""
        announced = [worker.announcement for worker in self.fleet]
        told = [rank for each in announced for rank in each.ranks if each.source(rank) is None]
        self.index.stream_lost(told, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """What time alone brings about: workers gone, reservations expired, checkpoints overdue."""
        effects: list[Effect] = [
            self._forget_worker(gone, "silent") for gone in self.fleet.take_gone(now_s)
        ]
        effects += [
            ReservationExpired(request_id, rank)
            for request_id, rank in self.tracker.expire(now_s)
            if isinstance(request_id, str)
        ]
        effects += self.foreign.tick(now_s)
        effects += [RequestCheckpoint(*each) for each in self.index.take_wanted_checkpoints(now_s)]
        effects += [RefuseWaiting(*each) for each in self.waiting.expire(now_s)]
        effects += self._woken()
        self._note_some(now_s)
        return effects

    def beacon(self, now_s: float) -> SendBeacon:
        """Mark this moment: reports that carry the mark prove how fresh the index is."""
        return SendBeacon(self._beacons.next(now_s))

    def tidy(self, now_s: float) -> bool:
        """Free a slice of what expired or was cleared; False once nothing is left to do."""
        return self.predictions.expire(now_s) | self.index.sweep(SWEEP_SUB_TABLES)

    def set_busy_thresholds(self, model_name: str, thresholds: BusyThresholds) -> None:
        """From now on ranks of this model are busy above these."""
        self.gate.set_thresholds(model_name, thresholds)

    # ── What callers ask ─────────────────────────────────────────────────────────────────────────

    def may_choose(self, scope: Scope, rank: Rank) -> bool:
        """Whether a rank of this scope may be chosen, load aside."""
        return rank in self._schedulable(scope)

    def busy_ranks(self, scope: Scope) -> list[Rank]:
        """The ranks of a scope that get nothing more for now. O(ranks)."""
        candidates = self._schedulable(scope)
        busy = self.gate.busy(candidates, self.gate.thresholds(scope.model_name))
        return [candidates.ranks[position] for position in np.flatnonzero(busy).tolist()]

    def identities(self, scope: Scope) -> frozenset[Identity]:
        """Under which identities a prompt of this scope has to be hashed."""
        return frozenset(worker.identity for worker in self.fleet.schedulable(scope))

    def match(
        self, scope: Scope, prompt: Prompt, workers: Iterable[WorkerAnnouncement]
    ) -> dict[Identity, OverlapScores]:
        """The cached prefix of every rank of a scope, under each identity these workers use."""
        return {
            identity: self._overlaps(scope, prompt.hashed(identity))
            for identity in dict.fromkeys(worker.identity for worker in workers)
        }

    def select(self, request: SelectRequest, prompt: Prompt, now_s: float) -> Placement:
        """Choose a rank for a prompt. Mutates nothing but the random state, and who is busy.

        Raises NoEndpointsError, WorkersOverloadedError.
        """
        passed = self._eligible(request)
        candidates, override = passed.candidates, request.router_config_override
        tracking, expected_tokens = self._tracking(override), request.expected_output_tokens
        table, overlaps = self._weigh(request, prompt, candidates, expected_tokens, tracking, now_s)
        if passed.factors is not None:
            table.column(TAINT_FACTOR)[:] = passed.factors
        settings = self._policy(override)
        choice = self._selector(request).choose(table, settings, self._rng)
        worker = candidates.worker_of(choice.table.ranks[choice.index])
        hashed = prompt.hashed(worker.identity)
        return Placement(choice, worker, hashed, overlaps[worker.identity])

    def weigh(self, request: PromptRequest, prompt: Prompt, now_s: float) -> TermTable:
        """Terms of every rank of a scope that may be chosen; there may be none."""
        candidates = self._schedulable(request.scope)
        return self._weigh(request, prompt, candidates, None, self._settings.tracking, now_s)[0]

    def select_and_reserve(
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement, list[Effect]]:
        """Choose a rank and book it, in one step.

        Raises MissingRequestIdError, DuplicateReservationError, TooManyReservationsError,
        NoEndpointsError, WorkersOverloadedError; then nothing is booked.
        """
        request_id = self._bookable_id(request.request_id)
        placement = self.select(request, prompt, now_s)
        rank, overlap_blocks = placement.rank, placement.overlap_blocks
        footprint = placement.prompt.footprint(overlap_blocks)
        counted = self._tracking(request.router_config_override).counted(footprint)
        self.gate.served(rank, request.lora_name, placement.worker.labels)
        return placement, self._book(request_id, request.scope, rank, footprint, counted, now_s)

    def submit(
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement | int, list[Effect]]:
        """Choose a rank and book it, or where all are busy have the request wait: its ticket.

        With that comes an `Admission` later, or a `RefuseWaiting`. Raises QueueFullError,
        TenantQueueFullError, and what `select_and_reserve` raises.
        """
        queue = self.waiting.queue(request.scope)
        if queue is None:
            return self.select_and_reserve(request, prompt, now_s)
        self._bookable_id(request.request_id)
        index = queue.classes.certain(request.policy_class)
        cached_tokens: int | None = None
        if index is None:
            cached_tokens = self._cached_tokens(request, prompt, now_s)
            uncached_tokens = prompt.isl_tokens - cached_tokens
            index = queue.classes.index(request.policy_class, uncached_tokens)
        if not len(queue) and self._has_room(request, queue.classes.all[index]):
            placement, effects = self.select_and_reserve(request, prompt, now_s)
            self.waiting.charge(request, index, placement.uncached_tokens, now_s)
            return placement, effects
        if cached_tokens is None:
            cached_tokens = self._cached_tokens(request, prompt, now_s)
        workers = len(self.fleet.schedulable(request.scope))
        ticket, refused = self.waiting.wait(request, prompt, index, cached_tokens, workers, now_s)
        return ticket, [*(RefuseWaiting(*each) for each in refused), AdmitWaiting()]

    def admit(self, now_s: float) -> Admission | None:
        """Place somebody whose turn it is, if a rank has room; the caller goes on until None."""
        taken = self.waiting.take(self._has_room, now_s)
        if taken is None:
            return None
        waiting, pending = taken
        outcome: Placement | KvRouterError
        try:
            outcome, effects = self.select_and_reserve(pending.request, pending.prompt, now_s)
        except KvRouterError as error:
            outcome, effects = error, []
        return Admission(
            waiting.ticket,
            pending.request.request_id,
            waiting.isl_tokens,
            outcome,
            pending.policy_class,
            now_s - waiting.since_s,
            effects,
        )

    def withdraw(self, ticket: int) -> bool:
        """Nobody waits for this ticket any more; False if it does not wait."""
        return self.waiting.withdraw(ticket)

    def reserve(
        self, request: ReserveRequest, prompt: Prompt, now_s: float
    ) -> tuple[WorkerAnnouncement, list[Effect]]:
        """Book a prompt on a rank the caller chose.

        Raises WorkerNotFoundError, and what `select_and_reserve` raises.
        """
        request_id = self._bookable_id(request.request_id)
        rank = Rank(request.worker_id, request.dp_rank)
        worker = self._find_worker(request.scope, rank)
        hashed = prompt.hashed(worker.identity)
        overlap_blocks = self._overlaps(request.scope, hashed).get(rank, NO_OVERLAP).device
        footprint = hashed.footprint(overlap_blocks)
        counted = self._settings.tracking.counted(footprint)
        self.gate.served(rank, request.lora_name, worker.labels)
        return worker, self._book(request_id, request.scope, rank, footprint, counted, now_s)

    def prefill_complete(self, request_id: str, now_s: float) -> list[Effect]:
        """A booked prompt is computed; idempotent. Raises ReservationNotFoundError."""
        return self._tell(request_id, PrefillCompleted(), now_s)

    def output_block(
        self, request_id: str, decay_fraction: float | None, now_s: float
    ) -> list[Effect]:
        """A booked request grew by a block. Raises ReservationNotFoundError, InvalidFieldError."""
        if decay_fraction is not None and not 0 <= decay_fraction <= 1:
            raise InvalidFieldError("decay_fraction", str(decay_fraction), "0.0 to 1.0")
        return self._tell(request_id, OutputBlockAdded(decay_fraction), now_s)

    def free(self, request_id: str, now_s: float) -> list[Effect]:
        """A booked request ended, or one that waits is not wanted any more.

        Raises ReservationNotFoundError.
        """
        ticket = self.waiting.ticket(request_id)
        if ticket is not None:
            self.waiting.withdraw(ticket)
            return [RefuseWaiting(ticket, WithdrawnError(request_id))]
        return self._tell(request_id, ReservationFreed(), now_s)

    def trust(self, rank: Rank, now_s: float) -> Trust:
        """How far an announced rank's overlap can be believed."""
        trust = self.index.trust(rank, now_s)
        worker = self.fleet.get(rank.worker_id)
        silent_s = None if worker is None else self.fleet.silence_s(worker, now_s)
        if silent_s is not None:
            reason = f"agent silent for {silent_s:.1f} s"
            return Trust(TrustState.BLIND, trust.event_id, trust.age_s, reason)
        if trust.state is TrustState.EXACT and self._is_cut_off(worker, rank):
            reason = "event bus disconnected"
            return Trust(TrustState.LAGGING, trust.event_id, trust.age_s, reason)
        return trust

    def dump(self) -> Iterator[tuple[Scope, RankBlocks]]:
        """Everything held, by scope, rank and tier; guesses only where there is nothing better."""
        return dumped_blocks(IndexDump(self.index.event_ids(), list(self.dump_slices())))

    def dump_slices(self) -> Iterator[tuple[Scope, HeldSlice]]:
        """The same in slices, between which all may change; see `IndexDump`."""
        yield from self.index.dump_slices()
        if self._settings.mode is IndexMode.APPROXIMATE:
            yield from self.predictions.dump_slices()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _eligible(self, request: SelectRequest) -> Passed:
        candidates = self._schedulable(request.scope)
        if not len(candidates):
            removed = self._unschedulable(request.scope)
            raise _no_endpoints(request, "no schedulable workers", removed)
        return self.gate.pass_through(request, candidates, self._prefill_labels(request))

    def _unschedulable(self, scope: Scope) -> list[RemovedRanks]:
        """Why each worker of a scope may not be chosen."""
        why: dict[str, list[Rank]] = {}
        for worker in self.fleet:
            if worker.announcement.scope == scope:
                reason = f"not schedulable ({self.fleet.obstacle(worker)})"
                why.setdefault(reason, []).extend(worker.announcement.ranks)
        return [removed_ranks(reason, ranks) for reason, ranks in why.items()]

    def _prefill_labels(self, request: SelectRequest) -> WorkerLabels | None:
        """Of the worker that has computed a prompt. Raises WorkerNotFoundError."""
        if request.prefill_worker_id is None:
            return None
        worker = self.fleet.get(request.prefill_worker_id)
        if worker is None:
            raise WorkerNotFoundError(request.prefill_worker_id, "named as prefill_worker_id")
        return worker.announcement.labels

    def _tracking(self, override: ConfigOverride | None) -> Tracking:
        return self._settings.tracking.overridden(override)

    def _schedulable(self, scope: Scope) -> Candidates:
        """Every rank of a scope that may be chosen; laid out once for each change of the fleet."""
        fleet_version, slots_version = self.fleet.version, self.ranks.version
        known = self._candidates.get(scope)
        if known is not None and known[:2] == (fleet_version, slots_version):
            return known[2]
        workers = self.fleet.schedulable(scope)
        candidates = Candidates.of(workers, self.ranks)
        if workers:
            self._candidates[scope] = (fleet_version, slots_version, candidates)
        else:
            self._candidates.pop(scope, None)
        return candidates

    def _weigh(
        self,
        request: PromptRequest,
        prompt: Prompt,
        candidates: Candidates,
        expected_output_tokens: int | None,
        tracking: Tracking,
        now_s: float,
    ) -> tuple[TermTable, dict[Identity, OverlapScores]]:
        overlaps = {
            identity: self._overlaps(request.scope, prompt.hashed(identity))
            for identity, _ in candidates.groups
        }
        table = self._weighing.weigh(
            request, prompt, candidates, overlaps, expected_output_tokens, now_s
        )
        if not tracking.active_blocks:
            table.column(DECODE_BLOCKS)[:] = np.nan
        elif not tracking.kv_reuse:
            table.column(NEW_BLOCKS)[:] = np.ceil(prompt.isl_tokens / table.column(BLOCK_SIZE))
        return table, overlaps

    def _has_room(self, request: SelectRequest, policy_class: PolicyClass) -> bool:
        """Whether not all that may serve a request are busy, by the standards of its class.

        With nobody left to serve it ever, it has its turn, to be told so.
        """
        try:
            candidates = self._eligible(request).candidates
        except WorkersOverloadedError:
            return False
        except KvRouterError:
            return True
        values, slots = self.ranks.values, candidates.slots
        prefill_tokens = values[:, PREFILL_TOKENS][slots]
        most_tokens = step_tokens(values[:, MAX_BATCHED_TOKENS][slots])
        busy = policy_class.are_busy(prefill_tokens, most_tokens)
        return not busy.all()

    def _cached_tokens(self, request: SelectRequest, prompt: Prompt, now_s: float) -> int:
        """Tokens of a prompt that are cached where most are, of all that may serve it."""
        candidates = self._eligible(request).candidates
        table, _ = self._weigh(request, prompt, candidates, None, self._settings.tracking, now_s)
        cached_tokens = table.column(OVERLAP_DEVICE) * table.column(BLOCK_SIZE)
        return min(prompt.isl_tokens, int(cached_tokens.max()))

    def _woken(self) -> list[Effect]:
        """Some rank may have become free."""
        return [AdmitWaiting()] if len(self.waiting) else []

    def _overlaps(self, scope: Scope, prompt: HashedPrompt) -> OverlapScores:
        known = self.index.find_matches(scope, prompt.sequence_hashes)
        return self.predictions.added_to(known, scope, prompt.sequence_hashes)

    def _selector(self, request: SelectRequest) -> Selector:
        override = request.router_config_override
        wanted = None if override is None else override.policy
        return self._policies.find(request.routing_group, wanted)

    def _policy(self, override: ConfigOverride | None) -> PolicySettings:
        return self._settings.policy.overridden(override)

    def _bookable_id(self, request_id: str | None) -> str:
        if request_id is None:
            raise MissingRequestIdError
        if request_id in self.tracker or request_id in self.waiting:
            raise DuplicateReservationError(request_id)
        if len(self.tracker) >= self._settings.max_reservations:
            raise TooManyReservationsError(self._settings.max_reservations)
        return request_id

    def _find_worker(self, scope: Scope, rank: Rank) -> WorkerAnnouncement:
        worker = self.fleet.get(rank.worker_id)
        if worker is not None and self.fleet.is_schedulable(worker):
            announced = worker.announcement
            if announced.scope == scope and rank in announced.ranks:
                return announced
        detail = f"with a schedulable dp_rank {rank.dp_rank} for model={scope.model_name} "
        raise WorkerNotFoundError(rank.worker_id, detail + f"routing_group={scope.routing_group}")

    def _book(
        self,
        request_id: str,
        scope: Scope,
        rank: Rank,
        footprint: Footprint,
        counted: Footprint,
        now_s: float,
    ) -> list[Effect]:
        """Book what counts of a request, and take it over from whoever else has booked it."""
        self.tracker.book(request_id, rank, counted, now_s)
        self.predictions.insert(scope, rank, footprint.sequence_hashes, now_s)
        return self.foreign.pass_on(request_id, ReservationFreed())

    def _tell(self, request_id: str, told: CallerTold, now_s: float) -> list[Effect]:
        """What a caller says of a request, to whoever has booked it; its end, to all of them."""
        if request_id not in self.tracker:
            effects = self.foreign.pass_on(request_id, told)
            if not effects:
                raise ReservationNotFoundError(request_id)
            return effects
        self._obey(request_id, told, now_s)
        effects = self.foreign.pass_on(request_id, told) if told == ReservationFreed() else []
        return [*effects, *self._woken()]

    def _obey(self, request_id: str, told: CallerTold, now_s: float) -> None:
        match told:
            case PrefillCompleted():
                self.tracker.prefill_complete(request_id, now_s)
            case OutputBlockAdded(decay_fraction) if self._settings.tracking.counts_output:
                self.tracker.add_output_blocks(request_id, 1, decay_fraction, now_s)
            case OutputBlockAdded():
                self.tracker.progress(request_id, now_s)
            case ReservationFreed():
                self.tracker.free(request_id, now_s)

    def _note_worker(self, rank: Rank, announcement: WorkerAnnouncement) -> None:
        self.ranks.add(rank)
        row, identity = self.ranks.row(rank), announcement.identity
        row[BLOCK_SIZE], row[EAGLE] = identity.block_size, identity.eagle
        row[CAPACITY_BLOCKS] = announcement.total_kv_blocks
        row[MAX_BATCHED_TOKENS] = announcement.max_num_batched_tokens
        row[DECODE_SIDE] = announcement.role == "decode"

    def _note_standing(self, rank: Rank, now_s: float, *, is_trusted: bool = False) -> None:
        """Note what the index says of a rank; `is_trusted`: the trust in it did not change."""
        if rank not in self.ranks:
            return
        row = self.ranks.row(rank)
        row[HELD_BLOCKS] = self.index.held_blocks(rank)
        row[USED_BLOCKS] = self.fleet.used_blocks(rank, now_s)
        if not is_trusted:
            row[TRUST_WEIGHT] = self.trust_weights.weight(self.trust(rank, now_s).state)

    def _note_some(self, now_s: float) -> None:
        """Renew the standing of some ranks: trust also changes with time."""
        if not self._to_note:
            self._to_note = list(self.ranks)
        for _ in range(min(NOTED_RANKS, len(self._to_note))):
            self._note_standing(self._to_note.pop(), now_s)

    def _is_cut_off(self, worker: Worker | None, rank: Rank) -> bool:
        """Its events come over the bus, which cannot be heard."""
        if self.fleet.is_connected or worker is None:
            return False
        return worker.announcement.source(rank) is None

    def _kept_ranks(self, before: WorkerAnnouncement, after: WorkerAnnouncement) -> set[Rank]:
        """Ranks whose index and reservations survive a change of announcement.

        A new life keeps nothing, unless its first checkpoint came before its announcement.
        """
        if (before.scope, before.identity) != (after.scope, after.identity):
            return set()
        both = {
            rank
            for rank in set(before.ranks) & set(after.ranks)
            if before.source(rank) == after.source(rank)
        }
        if before.incarnation == after.incarnation:
            return both
        return {rank for rank in both if self.index.incarnation(rank) == after.incarnation}

    def _forget_worker(self, announcement: WorkerAnnouncement, reason: str) -> WorkerGone:
        dropped = sum(self._forget_rank(rank) for rank in announcement.ranks)
        return WorkerGone(announcement.worker_id, reason, dropped)

    def _forget_rank(self, rank: Rank) -> int:
        self.index.drop_rank(rank)
        self.predictions.drop_rank(rank)
        dropped = sum(isinstance(each, str) for each in self.tracker.drop_rank(rank))
        self.predictor.drop(rank)
        self.gate.forget(rank)
        self.ranks.drop(rank)
        return dropped


def _no_endpoints(
    request: PromptRequest, reason: str, removed: list[RemovedRanks]
) -> NoEndpointsError:
    return NoEndpointsError(request.model_name, request.routing_group, reason, removed)
