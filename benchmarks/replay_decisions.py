"""The policy `dynamo-1.6` on the decisions of NVIDIA's own router, one by one.

Its report says when each request came, had its first token and ended, its log the chosen
worker and its cost. A core of ours receives the same, at the same moments, decides, and then
books what was decided there: so no decision depends on whether the one before it agreed.

Prompts are of whole blocks, because there only these are counted as load, and engines have room for
all blocks, because no log contains when which one was evicted.
"""

from collections.abc import Iterator, Mapping
from math import isclose
from random import Random

from msgspec import Struct
from replay_run import Decision, PeerRun

from router.core.commands import (
    Apply,
    ApplyLoad,
    ApplySlice,
    Free,
    PrefillComplete,
    Reserve,
    Select,
    SetConnected,
    UpsertWorker,
)
from router.core.core import RouterCore
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.loads import LoadReport
from router.protocol.requests import ReserveRequest, SelectRequest
from router.protocol.values import SCHEME, Identity, Rank, Tier
from router.publisher.journal.journal import EventJournal
from router.sequence.active.prompt import prepare
from router.simulator.traces import Trace, TraceRequest
from router.tools.simulate.specs import Spec, default_settings, named_policy

POLICY = Spec("dynamo-1.6", "dynamo-1.6", {})
REPORT_S = 1.0


class Agreement(Struct):
    """Counts of decisions: the same worker, or one as good; the same cost, to 1e-6."""

    decisions: int = 0
    workers: int = 0
    costs: int = 0


class Retold:
    """A core that receives what happened in a run of NVIDIA's."""

    def __init__(self, trace: Trace, workers: int, blocks: int) -> None:
        self._core: RouterCore = named_policy(POLICY, default_settings()).make_core(Random(1))
        self._core.handle(SetConnected(True), 0.0)
        identity = Identity(SCHEME, trace.block_size)
        self._journals = [EventJournal(Rank(i, 0), 1, identity) for i in range(workers)]
        self._report_id = 0
        for worker_id in range(workers):
            self._core.handle(
                UpsertWorker(
                    WorkerAnnouncement(
                        worker_id=worker_id,
                        name=str(worker_id),
                        endpoint=f"http://worker-{worker_id}",
                        identity=identity,
                        total_kv_blocks=blocks,
                        max_num_batched_tokens=8192,
                        incarnation=1,
                    )
                ),
                0.0,
            )
            self._tell(worker_id, 0.0)
        self.report(0.0)

    def report(self, now_s: float) -> None:
        """Report all as alive, and holding what they published."""
        self._report_id += 1
        for worker_id, journal in enumerate(self._journals):
            report = LoadReport(
                worker_id=worker_id,
                dp_rank=0,
                agent_incarnation=1,
                incarnation=1,
                report_id=self._report_id,
                event_id=journal.last_event_id,
                state=journal.taken_state,
            )
            self._core.handle(ApplyLoad(report), now_s)

    def decide(
        self, request: TraceRequest, decision: Decision, now_s: float, agreement: Agreement
    ) -> None:
        """Decide, compare, and book what was decided there."""
        prompt_fields = {
            "sequence_hashes": request.sequence_hashes,
            "isl_tokens": request.isl_tokens,
        }
        wanted = SelectRequest(**prompt_fields)
        prompt = prepare(wanted, self._core.identities(wanted.scope))
        choice = self._core.handle(Select(wanted, prompt), now_s)[0].choice
        costs = dict(zip(choice.table.ranks, choice.costs.tolist(), strict=True))
        ours = costs[Rank(decision.worker_id, 0)]
        agreement.decisions += 1
        agreement.workers += isclose(ours, min(costs.values()), rel_tol=1e-9)
        agreement.costs += isclose(ours, decision.logit, rel_tol=1e-6)
        booked = ReserveRequest(
            worker_id=decision.worker_id, request_id=decision.request_id, **prompt_fields
        )
        self._core.handle(Reserve(booked, prompt), now_s)

    def computed(self, request: TraceRequest, decision: Decision, now_s: float) -> None:
        """Its first token: its blocks are in the cache."""
        self._core.handle(PrefillComplete(decision.request_id), now_s)
        journal = self._journals[decision.worker_id]
        journal.stored(Tier.DEVICE, request.sequence_hashes, None)
        self._tell(decision.worker_id, now_s)

    def ended(self, decision: Decision, now_s: float) -> None:
        """Its last token."""
        self._core.handle(Free(decision.request_id), now_s)

    def _tell(self, worker_id: int, now_s: float) -> None:
        for message in self._journals[worker_id].take():
            self._core.handle(Apply(message), now_s)
            while self._core.handle(ApplySlice(), 0.0)[0]:
                pass


def agreement_with(trace: Trace, run: PeerRun, workers: int, blocks: int) -> Agreement:
    """How many of a run's decisions are ours."""
    retold, agreement, reported_s = Retold(trace, workers, blocks), Agreement(), 0.0
    requests = _requests_of(trace, run)
    for now_s, what, decision in _history(run):
        request = requests[decision.request_id]
        if now_s >= reported_s + REPORT_S:
            reported_s = now_s
            retold.report(now_s)
        if what == _ARRIVED:
            retold.decide(request, decision, now_s, agreement)
        elif what == _COMPUTED:
            retold.computed(request, decision, now_s)
        else:
            retold.ended(decision, now_s)
    return agreement


_COMPUTED, _ENDED, _ARRIVED = range(3)
"""In the order in which they count where they are simultaneous."""


def _history(run: PeerRun) -> Iterator[tuple[float, int, Decision]]:
    happened = []
    for place, decision in enumerate(run.decisions):
        served = run.served[decision.request_id]
        happened += [
            (served.arrival_time_ms, _ARRIVED, place),
            (served.first_token_ms, _COMPUTED, place),
            (served.last_token_ms, _ENDED, place),
        ]
    for time_ms, what, place in sorted(happened):
        yield time_ms / 1e3, what, run.decisions[place]


def _requests_of(trace: Trace, run: PeerRun) -> Mapping[str, TraceRequest]:
    """Decisions are made in the order of the trace."""
    requests: dict[str, TraceRequest] = {}
    for decision, request in zip(run.decisions, trace.requests, strict=True):
        if run.served[decision.request_id].input_length != request.isl_tokens:
            raise RuntimeError("the replay's decisions are not in the order of the trace")
        requests[decision.request_id] = request
    return requests
