"""All state of a router, and every command that changes it.

Synchronous and pure: time and randomness are arguments, nothing awaits, so no two requests can
choose on the same stale load, and a simulator can drive the very same object. Commands return their
answer and the effects that the world owes them.

    messages ──▶ apply, apply_load, upsert_worker, … ──▶ Fleet, TrustedIndex
    requests ──▶ select, reserve, free, …            ──▶ scheduler over both, Tracker
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

import numpy as np

from router.admitter import Admission, Admitter
from router.beacons import Beacons
from router.booker import Booker
from router.bookings import Bookings
from router.closed_loop.closed_loop import ClosedLoop
from router.core_settings import CoreSettings
from router.effects import (
    AdmitWaiting,
    Effect,
    FetchWorker,
    RefuseWaiting,
    RequestCheckpoint,
    ReservationExpired,
    SendBeacon,
)
from router.errors import (
    InvalidFieldError,
)
from router.fleet import Fleet
from router.foreign import ForeignReservations
from router.indexer.base import HeldSlice, Indexer, IndexMode, OverlapScores
from router.indexer.dumps import IndexDump, RankBlocks, dumped_blocks
from router.indexer.event_log import Verdict
from router.indexer.predictions import Predictions
from router.indexer.snapshot import RankSnapshot
from router.indexer.trusted_index import TrustedIndex
from router.membership import Membership
from router.placement import Explained, Placement
from router.placer import Placer
from router.plain import PlainPlacement, PlainRequest
from router.protocol.catalogue import Lifecycle, WorkerAnnouncement
from router.protocol.events import LogMessage
from router.protocol.loads import LoadReport
from router.protocol.replicas import (
    CallerTold,
    HandedOver,
    OutputBlockAdded,
    PeerMessage,
    PrefillCompleted,
    ProgressTold,
    PromptUsage,
    ReservationFreed,
)
from router.protocol.replies import Trust
from router.protocol.requests import (
    PromptRequest,
    ReserveRequest,
    SelectRequest,
)
from router.protocol.values import Identity, Rank, Scope
from router.queue_errors import WithdrawnError
from router.scheduler.busy import BusyThresholds
from router.scheduler.gate import Gate
from router.scheduler.predictor import Predictor
from router.scheduler.prefill_load import end_overdue
from router.scheduler.selector import Selector
from router.scheduler.settings import TrustWeights
from router.scheduler.terms import TermTable
from router.scheduler.waiting_room import WaitingRoom
from router.sequence.hashing import TokenArray
from router.sequence.prompt import Prompt
from router.sequence.rank_table import RankTable
from router.sequence.tracker import Tracker
from router.sequence.tracking import Tracking
from router.standing import Standing
from router.usage_check import UsageCheck

SWEEP_SUB_TABLES = 64
"""Sub-tables swept without a pause."""

SETTLED_RANKS = 64
"""Restored ranks checked without a pause."""


class RouterCore:
    """Owns `fleet`, `foreign`, `gate`, `index`, `predictions`, `predictor`, `ranks`, `tracker` and
    `waiting`, all of which may be read.
    """

    __slots__ = (
        "_admitter",
        "_beacons",
        "_booker",
        "_bookings",
        "_membership",
        "_placer",
        "_settings",
        "_standing",
        "_usage",
        "fleet",
        "foreign",
        "index",
        "naming",
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
        self._beacons = Beacons(rng)
        self.fleet = Fleet(settings.liveness)
        self.naming = settings.naming
        self.index = self._new_index(make_indexer)
        self.predictions = Predictions(settings.prediction)
        self.ranks = RankTable()
        self.tracker = Tracker(settings.reservation_ttl_s, self.ranks)
        self.predictor = Predictor(self.ranks)
        self.waiting = WaitingRoom(settings.queueing)
        self.foreign = ForeignReservations(
            settings.router_id,
            self.fleet,
            self.tracker,
            self.predictions,
            settings.max_reservations,
        )
        self._standing = Standing(self.ranks, self.fleet, self.index, self.trust_weights)
        known = (self.fleet, self.index, self.predictions, self.ranks, self.tracker)
        self._placer = Placer(settings, *known, self.foreign.crowd, selectors, rng)
        stores = (*known, self.predictor, self.foreign, self._standing)
        self._membership = Membership(*stores, self.gate)
        self._usage = UsageCheck(self.tracker, self.index, sees_events=self.reads_events)
        booked = (self.tracker, self.foreign, self.predictions, self.waiting)
        self._bookings = Bookings(settings, *booked, self._usage)
        self._booker = Booker(self._placer, self._bookings)
        self._admitter = Admitter(self.fleet, self._placer, self._booker, self.waiting)

    @property
    def gate(self) -> Gate:
        """Filters, and who is busy; to read."""
        return self._placer.gate

    @property
    def closed_loop(self) -> ClosedLoop:
        """What engines say of prompts, against what was predicted; to read."""
        return self._usage.closed_loop

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
        self._membership.upsert_worker(announcement, now_s)

    def remove_worker(self, worker_id: int, reason: str) -> list[Effect]:
        """Take a worker out, with index, load and reservations; unknown ones are passed over."""
        gone = self._membership.remove_worker(worker_id, reason)
        return [*gone, *self._woken()] if gone else []

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
        self._standing.note(message.rank, now_s, is_trusted=verdict is Verdict.APPLY)
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
        as_of_s = self._beacons.as_of_s(report)
        if self.fleet.hear(report, now_s, as_of_s):
            self.index.compare(report, as_of_s, now_s)
            self.predictor.observe(report, now_s)
            self._standing.note(report.rank, now_s)
        return []

    def apply_peer(self, message: PeerMessage, now_s: float) -> list[Effect]:
        """Take in what another router says of its reservations, or was told of one of ours; or take
        over what it gives us.
        """
        if isinstance(message, HandedOver):
            return self._bookings.inherit(message, now_s)
        if not isinstance(message, ProgressTold):
            return [*self.foreign.apply(message, now_s), *self._woken()]
        # Passed on no further: that would never end.
        return [*self._bookings.obey(message.request_id, message.told, now_s), *self._woken()]

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
        effects = self._membership.remove_silent(now_s)
        effects += [
            ReservationExpired(request_id, rank)
            for request_id, rank in self.tracker.expire(now_s)
            if isinstance(request_id, str)
        ]
        effects += self.foreign.tick(now_s)
        effects += [RequestCheckpoint(*each) for each in self.index.take_wanted_checkpoints(now_s)]
        effects += [RefuseWaiting(*each) for each in self.waiting.expire(now_s)]
        if self._settings.models_prefill or self.tracker.silence.is_usual:
            end_overdue(self.ranks, self.tracker, now_s)
        effects += self._woken()
        self._standing.note_some(now_s)
        self._usage.closed_loop.settle(now_s)
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
        return rank in self._placer.schedulable(scope)

    def busy_ranks(self, scope: Scope) -> list[Rank]:
        """The ranks of a scope that get nothing more for now. O(ranks)."""
        candidates = self._placer.schedulable(scope)
        busy = self.gate.busy(candidates, self.gate.thresholds(scope.model_name))
        return [candidates.ranks[position] for position in np.flatnonzero(busy).tolist()]

    def tracking(self, request: SelectRequest | ReserveRequest) -> Tracking:
        """What of a booking is counted."""
        return self._placer.tracking(request)

    def identities(self, scope: Scope) -> Sequence[Identity]:
        """Under which identities a prompt of this scope has to be hashed."""
        return self._placer.schedulable(scope).identities

    def match(
        self, scope: Scope, prompt: Prompt, workers: Iterable[WorkerAnnouncement]
    ) -> dict[Identity, OverlapScores]:
        """The cached prefix of every rank of a scope, under each identity these workers use."""
        return {
            identity: self._placer.overlaps(scope, prompt.hashed(identity))
            for identity in dict.fromkeys(worker.identity for worker in workers)
        }

    def select(self, request: SelectRequest, prompt: Prompt, now_s: float) -> Placement:
        """Choose a rank for a prompt. Mutates nothing but the random state, and who is busy.

        Raises NoEndpointsError, WorkersOverloadedError.
        """
        return self._placer.place(request, prompt, now_s)

    def select_plain(
        self, request: PlainRequest, tokens: TokenArray, now_s: float
    ) -> PlainPlacement | None:
        """`select` of a request that asks for a rank only; None, and nothing has changed: `select`
        has to find out. Raises nothing.
        """
        placer = self._placer
        candidates = placer.schedulable(request.scope)
        return placer.short_cut.place_plain(request, tokens, candidates, now_s)

    def explain(self, request: SelectRequest, placement: Placement) -> Explained:
        """Why a request was placed there. O(candidates)."""
        return self._placer.explain(request, placement)

    def weigh(self, request: PromptRequest, prompt: Prompt, now_s: float) -> TermTable:
        """Terms of every rank of a scope that may be chosen; there may be none."""
        return self._placer.weigh(request, prompt, now_s)

    def select_and_reserve(
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement, list[Effect]]:
        """Choose a rank and book it, in one step.

        Raises MissingRequestIdError, DuplicateReservationError, TooManyReservationsError,
        NoEndpointsError, WorkersOverloadedError; then nothing is booked.
        """
        return self._booker.select_and_reserve(request, prompt, now_s)

    def submit(
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement | int, list[Effect]]:
        """Choose a rank and book it, or where all are busy have the request wait: its ticket.

        With that comes an `Admission` later, or a `RefuseWaiting`. Raises QueueFullError,
        TenantQueueFullError, and what `select_and_reserve` raises.
        """
        return self._admitter.submit(request, prompt, now_s)

    def admit(self, now_s: float) -> Admission | None:
        """Place somebody whose turn it is, if a rank has room; the caller goes on until None."""
        return self._admitter.admit(now_s)

    def withdraw(self, ticket: int) -> bool:
        """Nobody waits for this ticket any more; False if it does not wait."""
        return self.waiting.withdraw(ticket)

    def reserve(
        self, request: ReserveRequest, prompt: Prompt, now_s: float
    ) -> tuple[WorkerAnnouncement, list[Effect]]:
        """Book a prompt on a rank the caller chose.

        Raises WorkerNotFoundError, and what `select_and_reserve` raises.
        """
        return self._booker.reserve(request, prompt, now_s)

    def prefill_complete(
        self,
        request_id: str,
        now_s: float,
        usage: PromptUsage | None = None,
        in_batch: bool = False,
    ) -> list[Effect]:
        """A booked prompt is computed; idempotent. Raises ReservationNotFoundError.

        `in_batch`: callers who report many requests in one call do so from time to time; until the
        next time decisions go by what such a request should have generated.
        """
        return self._tell(request_id, PrefillCompleted(usage, in_batch), now_s)

    def output_block(
        self,
        request_id: str,
        decay_fraction: float | None,
        now_s: float,
        in_batch: bool = False,
    ) -> list[Effect]:
        """A booked request grew by a block; `in_batch`: see `prefill_complete`. Raises
        ReservationNotFoundError, InvalidFieldError.
        """
        if decay_fraction is not None and not 0 <= decay_fraction <= 1:
            raise InvalidFieldError("decay_fraction", str(decay_fraction), "0.0 to 1.0")
        return self._tell(request_id, OutputBlockAdded(decay_fraction, in_batch), now_s)

    def free(self, request_id: str, now_s: float, usage: PromptUsage | None = None) -> list[Effect]:
        """A booked request ended, or one that waits is not wanted any more.

        Raises ReservationNotFoundError.
        """
        ticket = self.waiting.ticket(request_id)
        if ticket is not None:
            self.waiting.withdraw(ticket)
            return [RefuseWaiting(ticket, WithdrawnError(request_id))]
        return self._tell(request_id, ReservationFreed(usage), now_s)

    def trust(self, rank: Rank, now_s: float) -> Trust:
        """How far an announced rank's overlap can be believed."""
        return self._standing.trust(rank, now_s)

    def dump(self) -> Iterator[tuple[Scope, RankBlocks]]:
        """Everything held, by scope, rank and tier; guesses only where there is nothing better."""
        return dumped_blocks(IndexDump(self.index.event_ids(), list(self.dump_slices())))

    def dump_slices(self) -> Iterator[tuple[Scope, HeldSlice]]:
        """The same in slices, between which all may change; see `IndexDump`."""
        yield from self.index.dump_slices()
        if self._settings.mode is IndexMode.APPROXIMATE:
            yield from self.predictions.dump_slices()

    # ── How ──────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, request_id: str, told: CallerTold, now_s: float) -> list[Effect]:
        return [*self._bookings.tell(request_id, told, now_s), *self._woken()]

    def _new_index(self, make_indexer: Callable[[], Indexer]) -> TrustedIndex:
        return TrustedIndex(make_indexer, self._settings.mode, self.naming.scheme)

    def _woken(self) -> list[Effect]:
        """Some rank may have become free."""
        return [AdmitWaiting()] if len(self.waiting) else []
