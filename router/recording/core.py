"""A core that tells of everything it is told and asked, in order.

A command is told of before it is carried out, a decision after, with its outcome. What raises
without having changed anything is not told of.
"""

from collections.abc import Callable, Iterable
from random import Random
from typing import TypeAlias, TypeVar

from router.admitter import Admission
from router.core import RouterCore
from router.core_settings import CoreSettings
from router.effects import Effect, SendBeacon
from router.errors import KvRouterError
from router.indexer.base import Indexer, IndexMode, OverlapScores
from router.indexer.event_log import Verdict
from router.indexer.snapshot import RankSnapshot
from router.indexer.trusted_index import TrustedIndex
from router.placement import Placement
from router.plain import PlainRequest
from router.protocol.catalogue import Lifecycle, WorkerAnnouncement
from router.protocol.events import LogMessage
from router.protocol.loads import LoadReport
from router.protocol.replicas import PeerMessage, PromptUsage
from router.protocol.requests import ReserveRequest, SelectRequest
from router.protocol.values import HashArray, Scope
from router.recording.commands import (
    Apply,
    ApplyLoad,
    ApplyPeer,
    ApplySlice,
    BeginFill,
    Command,
    Free,
    MarkBeacon,
    OrderWorker,
    OutputBlock,
    PrefillComplete,
    RemoveWorker,
    Resume,
    Search,
    SetBusyThresholds,
    SetConnected,
    SetProblem,
    Settle,
    StreamLost,
    Tick,
    Tidy,
    Withdraw,
    upserted,
)
from router.recording.decisions import (
    Admit,
    Decision,
    Outcome,
    Reserve,
    Select,
    SelectAndReserve,
    Submit,
    chosen,
    plain,
    refused,
    reserved,
    submitted,
)
from router.scheduler.busy import BusyThresholds
from router.scheduler.selector import Selector
from router.sequence.hashing import TokenArray
from router.sequence.prompt import Prompt

T = TypeVar("T")
Record: TypeAlias = Callable[[Command | Decision], None]


class RecordedIndex(TrustedIndex):
    """An index that tells of every search."""

    __slots__ = ("_searched",)

    def __init__(
        self,
        make_indexer: Callable[[], Indexer],
        mode: IndexMode,
        searched: Callable[[Scope, HashArray], None],
    ) -> None:
        super().__init__(make_indexer, mode)
        self._searched = searched

    def find_matches(self, scope: Scope, sequence_hashes: HashArray) -> OverlapScores:
        """The longest held prefix, per rank of the scope."""
        self._searched(scope, sequence_hashes)
        return super().find_matches(scope, sequence_hashes)

    def tree(self, scope: Scope) -> None:  # noqa: ARG002
        """None: what is searched is told of."""
        return


class RecordedCore(RouterCore):
    """A core that calls `record` for everything that a core like it would have to be told."""

    __slots__ = ("_is_deciding", "_record")

    def __init__(
        self,
        settings: CoreSettings,
        make_indexer: Callable[[], Indexer],
        rng: Random,
        record: Record,
        selectors: Iterable[Selector] | None = None,
    ) -> None:
        self._record = record
        self._is_deciding = False
        super().__init__(settings, make_indexer, rng, selectors)

    def upsert_worker(self, announcement: WorkerAnnouncement, now_s: float) -> None:
        """See `RouterCore`."""
        self._record(upserted(announcement, now_s))
        super().upsert_worker(announcement, now_s)

    def remove_worker(self, worker_id: int, reason: str) -> list[Effect]:
        """See `RouterCore`."""
        self._record(RemoveWorker(worker_id, reason))
        return super().remove_worker(worker_id, reason)

    def order_worker(self, worker_id: int, lifecycle: Lifecycle | None) -> None:
        """See `RouterCore`."""
        self._record(OrderWorker(worker_id, lifecycle))
        super().order_worker(worker_id, lifecycle)

    def set_problem(self, worker_id: int, problem: str | None) -> None:
        """See `RouterCore`."""
        self._record(SetProblem(worker_id, problem))
        super().set_problem(worker_id, problem)

    def apply(self, message: LogMessage, now_s: float) -> Verdict | None:
        """See `RouterCore`."""
        self._record(Apply(message, now_s))
        return super().apply(message, now_s)

    def apply_slice(self) -> bool:
        """See `RouterCore`. After every message it is asked for a slice that is not there."""
        was_applied = super().apply_slice()
        if was_applied:
            self._record(ApplySlice())
        return was_applied

    def begin_fill(self) -> None:
        """See `RouterCore`."""
        self._record(BeginFill())
        super().begin_fill()

    def resume(self, each: RankSnapshot, now_s: float) -> bool:
        """See `RouterCore`."""
        self._record(Resume.of(each, now_s))
        return super().resume(each, now_s)

    def settle(self, now_s: float) -> bool:
        """See `RouterCore`."""
        self._record(Settle(now_s))
        return super().settle(now_s)

    def apply_load(self, report: LoadReport, now_s: float) -> list[Effect]:
        """See `RouterCore`."""
        self._record(ApplyLoad.of(report, now_s))
        return super().apply_load(report, now_s)

    def apply_peer(self, message: PeerMessage, now_s: float) -> list[Effect]:
        """See `RouterCore`."""
        self._record(ApplyPeer(message, now_s))
        return super().apply_peer(message, now_s)

    def set_connected(self, connected: bool, now_s: float) -> None:
        """See `RouterCore`."""
        self._record(SetConnected(connected, now_s))
        super().set_connected(connected, now_s)

    def stream_lost(self, now_s: float) -> None:
        """See `RouterCore`."""
        self._record(StreamLost(now_s))
        super().stream_lost(now_s)

    def set_busy_thresholds(self, model_name: str, thresholds: BusyThresholds) -> None:
        """See `RouterCore`."""
        self._record(SetBusyThresholds(model_name, thresholds))
        super().set_busy_thresholds(model_name, thresholds)

    def tick(self, now_s: float) -> list[Effect]:
        """See `RouterCore`."""
        self._record(Tick(now_s))
        return super().tick(now_s)

    def beacon(self, now_s: float) -> SendBeacon:
        """See `RouterCore`. It draws from the random numbers that decisions draw from."""
        self._record(MarkBeacon(now_s))
        return super().beacon(now_s)

    def tidy(self, now_s: float) -> bool:
        """See `RouterCore`."""
        self._record(Tidy(now_s))
        return super().tidy(now_s)

    def select(self, request: SelectRequest, prompt: Prompt, now_s: float) -> Placement:
        """See `RouterCore`."""
        return self._decide(
            lambda: super(RecordedCore, self).select(request, prompt, now_s),
            lambda placement: chosen(placement.choice),
            lambda outcome: Select(plain(request, SelectRequest), now_s, outcome),
        )

    def select_plain(self, _request: PlainRequest, _tokens: TokenArray, _now_s: float) -> None:
        """None: what is recorded is a whole request, and all that its choice was made from."""

    def select_and_reserve(
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement, list[Effect]]:
        """See `RouterCore`."""
        return self._decide(
            lambda: super(RecordedCore, self).select_and_reserve(request, prompt, now_s),
            lambda booked: chosen(booked[0].choice),
            lambda outcome: SelectAndReserve(plain(request, SelectRequest), now_s, outcome),
        )

    def submit(
        self, request: SelectRequest, prompt: Prompt, now_s: float
    ) -> tuple[Placement | int, list[Effect]]:
        """See `RouterCore`."""
        return self._decide(
            lambda: super(RecordedCore, self).submit(request, prompt, now_s),
            lambda answer: submitted(answer[0]),
            lambda outcome: Submit(plain(request, SelectRequest), now_s, outcome),
        )

    def admit(self, now_s: float) -> Admission | None:
        """See `RouterCore`. Looking for somebody may change who counts as busy."""
        if not len(self.waiting):
            return super().admit(now_s)
        self._is_deciding = True
        try:
            admission = super().admit(now_s)
        finally:
            self._is_deciding = False
        self._record(Admit.of(now_s, admission))
        return admission

    def withdraw(self, ticket: int) -> bool:
        """See `RouterCore`."""
        self._record(Withdraw(ticket))
        return super().withdraw(ticket)

    def reserve(
        self, request: ReserveRequest, prompt: Prompt, now_s: float
    ) -> tuple[WorkerAnnouncement, list[Effect]]:
        """See `RouterCore`."""
        return self._decide(
            lambda: super(RecordedCore, self).reserve(request, prompt, now_s),
            lambda _: reserved(self, request),
            lambda outcome: Reserve(plain(request, ReserveRequest), now_s, outcome),
        )

    def prefill_complete(
        self,
        request_id: str,
        now_s: float,
        usage: PromptUsage | None = None,
        in_batch: bool = False,
    ) -> list[Effect]:
        """See `RouterCore`. No decision depends on a usage."""
        effects = super().prefill_complete(request_id, now_s, usage, in_batch)
        self._record(PrefillComplete(request_id, now_s, in_batch=in_batch))
        return effects

    def output_block(
        self,
        request_id: str,
        decay_fraction: float | None,
        now_s: float,
        in_batch: bool = False,
    ) -> list[Effect]:
        """See `RouterCore`."""
        effects = super().output_block(request_id, decay_fraction, now_s, in_batch)
        self._record(OutputBlock(request_id, decay_fraction, now_s, in_batch))
        return effects

    def free(self, request_id: str, now_s: float, usage: PromptUsage | None = None) -> list[Effect]:
        """See `RouterCore`. No decision depends on a usage."""
        effects = super().free(request_id, now_s, usage)
        self._record(Free(request_id, now_s))
        return effects

    def _decide(
        self,
        decide: Callable[[], T],
        outcome_of: Callable[[T], Outcome],
        entry_of: Callable[[Outcome], Decision],
    ) -> T:
        self._is_deciding = True
        try:
            decided = decide()
        except KvRouterError as error:
            self._record(entry_of(refused(error)))
            raise
        finally:
            self._is_deciding = False
        self._record(entry_of(outcome_of(decided)))
        return decided

    def _new_index(self, make_indexer: Callable[[], Indexer]) -> TrustedIndex:
        return RecordedIndex(make_indexer, self._settings.mode, self._note_search)

    def _note_search(self, scope: Scope, sequence_hashes: HashArray) -> None:
        if not self._is_deciding:
            self._record(Search.of(scope, sequence_hashes))
