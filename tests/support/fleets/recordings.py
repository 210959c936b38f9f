"""Random lives of a recorded core, and their recordings."""

import math
from contextlib import suppress
from io import BytesIO
from random import Random

from msgspec import structs

from router.config.router import RouterConfig
from router.core.commands import (
    Admit,
    Apply,
    ApplyLoad,
    ApplyPeer,
    ApplyPolled,
    ApplySlice,
    BeginFill,
    Free,
    MarkBeacon,
    OrderWorker,
    OutputBlock,
    PrefillComplete,
    Reconfigure,
    RemoveWorker,
    Reserve,
    Resume,
    Select,
    SelectAndReserve,
    SetBusyThresholds,
    SetCaution,
    SetConnected,
    SetProblem,
    SetSourceFault,
    Settle,
    StreamLost,
    Submit,
    Tick,
    Tidy,
    UpsertImplicit,
    UpsertRegistered,
    UpsertWorker,
    Withdraw,
)
from router.core.registered_workers import EventSource, ImplicitWorker, RegisteredWorker
from router.errors import KvRouterError
from router.indexer.base import ExportedBlocks
from router.indexer.errors import IndexDisabledError
from router.indexer.rank_index import SourceFault
from router.indexer.snapshot import RankSnapshot
from router.observability.recording import decision_settings
from router.protocol.catalogue import WorkerLabels
from router.protocol.commands import NewCommand
from router.protocol.events import EventBatch
from router.protocol.loads import LoadCounters, LoadGauges, PolledLoad, TimedWork
from router.protocol.replicas import PrefillCompleted, ProgressTold
from router.protocol.requests import (
    ConfigOverride,
    RankTarget,
    ReserveRequest,
    RoutingConstraints,
    SelectRequest,
)
from router.protocol.values import SCHEME, Identity, Rank, Scope, Tier
from router.protocol.workers import EngineSource, WorkerRegistration
from router.publisher.journal.journal import EventJournal
from router.recording.format import (
    Header,
    Line,
    decode_header,
    decode_lines,
    encode_header,
    encode_line,
)
from router.recording.replay import Replay
from router.runtime.process.settings import configured
from router.scheduler.busy import BusyThresholds
from router.scheduler.policy.registry import builtin_policies
from router.scheduler.queue.waiting_room import Queueing
from router.scheduler.settings import PolicySettings
from router.sequence.active.prompt import prepare
from router.sequence.rank_table import BUSY
from router.tools.recordings.cores import recorded_core, replayed_core
from support.fleets.peers import Other
from support.values.builders import IDENTITY, announcement, report

PROMPTS = [[100 * family + i // 40 for i in range(length)] for family in (1, 2, 3) for length in (
    3, 16, 40, 90, 2600)]  # fmt: skip
WORKERS = range(1, 5)
OTHER = Identity(SCHEME, 8)
PREFERS_A = RoutingConstraints(preferred_taints={"a": 2.0})


OVERRIDES = [
    ConfigOverride(router_temperature=0.7),
    ConfigOverride(policy="of nobody"),
    *(ConfigOverride(policy=policy.name) for policy in builtin_policies()),
]


def header(seed=7, **settings):
    """Of a core that spreads keys in the same way in every run of a test."""
    return Header(
        product_version="0",
        recorded_at="",
        settings=decision_settings(configured(RouterConfig, **settings)),
        seed=seed,
        multiplier=0xD1B54A32D192ED03,
    )


class Recorded:
    """A core and its recording so far."""

    def __init__(self, seed=7, **settings):
        self.header = header(seed, **settings)
        self.entries = []
        self.core = recorded_core(self.header, self.entries.append)

    @property
    def recording(self):
        lines = (encode_line(Line(0.25 * i, entry)) for i, entry in enumerate(self.entries))
        return encode_header(self.header) + b"".join(lines)


def small():
    """One worker, one request."""
    recorded, request = Recorded(), SelectRequest(token_ids=[1, 2, 3, 4, 5], request_id="r1")
    recorded.core.handle(UpsertWorker(announcement(1, agent_is_engine=False)), 0.0)
    for message in EventJournal(Rank(1, 0), 1, IDENTITY).take():
        recorded.core.handle(Apply(message), 0.25)
    recorded.core.handle(SelectAndReserve(request, prepare(request, ())), 0.5)
    recorded.core.handle(Free("r1"), 0.75)
    return recorded


def replayed(recording, **settings):
    """The replay, and every decision compared."""
    file = BytesIO(recording)
    replay = Replay(replayed_core(decode_header(file.readline()), settings))
    compared = [replay.take(number, line) for number, line in decode_lines(file)]
    return replay, [each for each in compared if each is not None]


def state(core):
    """All that later decisions could depend on."""
    return {
        "rng": core._placer._rng.getstate(),
        "fleet": [structs.astuple(w.announcement) for w in core.fleet],
        "heard": [(w.last_seen_s, w.was_seen) for w in core.fleet],
        "held": _held(core),
        "stats": core.index.stats(),
        "states": [structs.astuple(each) for each in core.index.rank_states()],
        "logs": {r: (core.index.incarnation(r), core.index.is_broken(r)) for r in core.ranks},
        "faults": dict(core.index.faults()),
        "active": {
            r: (a.active_blocks, a.active_prefill_tokens)
            for r in core.ranks
            for a in [core.tracker.active(r)]
        },
        "rows": {rank: core.ranks.row(rank).tolist() for rank in core.ranks},
        "expiries": core.tracker.expiries(),
        "foreign": core.tracker.foreign_count,
        "guesses": core.predictions.entry_counts(),
        "thresholds": [(model, core.gate.thresholds(model)) for model in core.gate.models],
        "busy": [rank for rank in core.ranks if core.ranks.row(rank)[BUSY]],
        "waiting": dict(core.waiting.tickets),
        "settings": core.settings,
        "credit": [
            (scope, [(q.deficit_tokens, q.shares._levels) for q in queue.queues])
            for scope, queue in core.waiting.queues()
        ],
    }  # fmt: skip


def _held(core):
    with suppress(IndexDisabledError):
        return [(scope, b.rank, b.tier, sorted(b.sequence_hashes.tolist()))
                for scope, b in core.dump()]  # fmt: skip


class RandomLife(Recorded):
    """Whatever can happen to a core, by seed."""

    def __init__(self, seed, **settings):
        super().__init__(seed, **settings)
        self.random = Random(seed)
        self.now_s = self.random.uniform(0, 1e6)
        self.journals = {}
        self.other = Other()
        self.booked = []
        self.refused = 0
        self.core.handle(SetConnected(True), self.now_s)

    def live(self, steps):
        """Take `steps` random steps."""
        happenings = [
            *[self.place] * 6, *[self.cache] * 6, *[self.progress] * 4, self.worker, self.worker,
            self.report, self.report, self.evict, self.wait, self.lose, self.order, self.see,
            self.leave, self.search, self.look_often, self.new_life, self.nonsense, self.register,
            self.overhear, self.stream_lost, self.resume, self.resume, self.slices, self.slices,
            self.tidy, self.limit, self.poll, self.reconfigure,
            self.rush, self.admit, self.admit, self.hang_up, self.hang_up,
            self.report_router, self.report_router, self.report_router,
        ]  # fmt: skip
        for worker_id in WORKERS:
            self.worker(worker_id)
        for _ in range(steps):
            with suppress(KvRouterError):
                self.random.choice(happenings)()
        return self

    def worker(self, worker_id=None):
        announced = announcement(
            worker_id or self.random.choice(WORKERS),
            incarnation=self.random.choice([1, 1, 1, 2]),
            identity=self.random.choice([IDENTITY, IDENTITY, OTHER]),
            data_parallel_size=self.random.randint(1, 2),
            agent_is_engine=self.random.random() < 0.5,
            labels=WorkerLabels(taints=self.random.choice([[], ["a"]])),
        )
        self.core.handle(UpsertWorker(announced), self.now_s)
        for rank in announced.ranks:
            known = self.journals.get(rank)
            if known is None or (known.incarnation, known.identity) != (
                announced.incarnation, announced.identity,
            ):  # fmt: skip
                self.journals[rank] = EventJournal(rank, announced.incarnation, announced.identity)
            self.journals[rank].require_checkpoint()
            self.deliver(rank)
            self.report_load(rank)

    def register(self):
        worker_id = 9
        dp_rank = self.random.randint(0, 2)
        sources = {dp_rank: EngineSource("tcp://e:1")} if self.random.random() < 0.5 else {}
        announced = structs.asdict(announcement(worker_id, agent_is_engine=False))
        self.core.handle(
            UpsertRegistered(
                RegisteredWorker(
                    **announced,
                    registration=WorkerRegistration(worker_id=worker_id),
                    dp_ranks=(dp_rank,),
                    sources=sources,
                    is_without_events=not sources and self.random.random() < 0.5,
                )
            ),
            self.now_s,
        )

    def overhear(self):
        ranks = tuple(sorted(self.random.sample(range(4), 2)))
        announced = structs.asdict(announcement(7, agent_is_engine=False))
        heard_from = EventSource("dynamo://ns/backend")
        worker = ImplicitWorker(**announced, dp_ranks=ranks, heard_from=heard_from)
        self.core.handle(UpsertImplicit(worker), self.now_s)

    def leave(self):
        self.core.handle(RemoveWorker(self.random.randint(1, 9), "gone"), 0.0)

    def order(self):
        lifecycle = self.random.choice(["cordoned", "schedulable", "draining", None, None])
        self.core.handle(OrderWorker(self.random.choice(WORKERS), lifecycle), 0.0)

    def limit(self):
        tokens = self.random.choice([None, 0, 30, 60])
        thresholds = BusyThresholds(active_prefill_tokens_threshold=tokens)
        self.core.handle(SetBusyThresholds("default", thresholds), 0.0)

    def reconfigure(self):
        """Now and then settings are changed, to some with queues and to some without."""
        if self.random.random() < 0.3:
            settings = structs.replace(
                self.core.settings,
                default_policy=self.random.choice(["predictive", "power-of-two", "dynamo-1.6"]),
                max_reservations=self.random.choice([3, 1000]),
                policy=PolicySettings(router_temperature=self.random.choice([0.0, 0.4])),
                queueing=Queueing(self.random.choice([None, 0.0, 0.01]), "wspt"),
            )
            self.core.handle(Reconfigure.of(settings), self.now_s)

    def see(self):
        problem = self.random.choice(["gone", None, None])
        worker_id = self.random.choice(WORKERS)
        self.core.handle(SetProblem(worker_id, problem), 0.0)
        self.core.handle(SetCaution(worker_id - 1, problem), self.now_s)
        fault = self.random.choice([SourceFault("dead", "estimate"), SourceFault("wrong"), None])
        rank = self.random.choice(list(self.core.ranks))
        self.core.handle(SetSourceFault(rank, fault), self.now_s)

    def cache(self):
        rank, journal = self._any_rank()
        hashes = self._hashes(journal.identity)
        start = self.random.choice([0, 0, 0, len(hashes) // 2])
        tier = self.random.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
        journal.stored(tier, hashes[start:], hashes[start - 1] if start else None)
        self.deliver(rank, rest=self.random.random() < 0.5)

    def evict(self):
        rank, journal = self._any_rank()
        hashes = self._hashes(journal.identity)
        if self.random.random() < 0.2:
            journal.cleared(self.random.choice([None, Tier.DEVICE]))
        else:
            journal.removed(Tier.DEVICE, hashes[self.random.randrange(len(hashes) + 1) :])
        self.deliver(rank)

    def lose(self):
        """A message on the way, or all but a part of it."""
        _, journal = self._any_rank()
        journal.stored(Tier.DEVICE, self._hashes(journal.identity), None)
        messages = journal.take()
        if len(messages) > 1:
            self.core.handle(Apply(messages[0]), self.now_s)
        if self.random.random() < 0.7:
            journal.require_checkpoint()

    def nonsense(self):
        rank, journal = self._any_rank()
        event_id = journal.last_event_id
        batch = EventBatch(*structs.astuple(rank), journal.incarnation, journal.identity,
                           event_id + 1, event_id + 1, b"nonsense" * 20)  # fmt: skip
        self.core.handle(Apply(batch), self.now_s)

    def new_life(self):
        rank, journal = self._any_rank()
        journal.new_life(journal.incarnation + 1)
        self.deliver(rank)

    def deliver(self, rank, rest=True):
        for message in self.journals[rank].take():
            self.core.handle(Apply(message), self.now_s)
            while rest and self.core.handle(ApplySlice(), 0.0)[0]:
                pass

    def slices(self):
        self.core.handle(ApplySlice(), 0.0)

    def report(self):
        self.report_load(self._any_rank()[0])

    def report_load(self, rank):
        journal, beacon = self.journals[rank], self.core.handle(MarkBeacon(), self.now_s)[0]
        self.core.handle(
            ApplyLoad(
                report(
                    *structs.astuple(rank),
                    incarnation=journal.incarnation,
                    event_id=journal.last_event_id,
                    state=journal.taken_state,
                    waiting_s=self.random.choice([0.0, 0.5, math.inf]),
                    heard={beacon.source_id: beacon.beacon_id},
                )
            ),
            self.now_s,
        )

    def poll(self):
        """Only registered and implicit ranks have no agent; the load of others is ignored."""
        rank = self.random.choice(list(self.core.ranks))
        done = LoadCounters(
            steps=self.random.randrange(100),
            busy_s=self.random.random() * 5,
            prefill_tokens=self.random.randrange(10_000),
            requests_finished=1,
        )
        polled = PolledLoad(
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            source_id=1,
            life_id=1,
            gauges=LoadGauges(running_requests=self.random.randrange(3)),
            counters=done,
            timed=(TimedWork(done, 0.1),),
        )
        self.core.handle(ApplyPolled(polled), self.now_s)

    def wait(self):
        self.now_s += self.random.choice([0.001, 0.1, 1.1, 30.0])
        if self.random.random() < 0.1:
            self.core.handle(SetConnected(self.random.random() < 0.8), self.now_s)
        self.core.handle(Tick(), self.now_s)

    def tidy(self):
        while self.core.handle(Tidy(), self.now_s)[0] and self.random.random() < 0.9:
            pass

    def stream_lost(self):
        if self.random.random() < 0.1:
            self.core.handle(StreamLost(), self.now_s)

    def resume(self):
        """A rank is announced anew, and goes on from a snapshot, right or not."""
        states = {state.rank: state for state in self.core.index.rank_states()}
        rank, journal = self._any_rank()
        worker = self.core.fleet.get(rank.worker_id)
        if worker is None or rank not in states:
            return
        self.core.handle(BeginFill(), 0.0)
        self.core.handle(RemoveWorker(rank.worker_id, "restart"), 0.0)
        self.core.handle(UpsertWorker(worker.announcement), self.now_s)
        blocks = [
            ExportedBlocks(rank, t, journal.held(t)[self.random.choice([0, 0, 1]) :]) for t in Tier
        ]
        self.core.handle(Resume.of(RankSnapshot(states[rank], blocks)), self.now_s)
        while self.random.random() < 0.9 and self.core.handle(ApplySlice(), 0.0)[0]:
            pass
        self.place()
        while self.core.handle(Settle(), self.now_s)[0]:
            pass

    def report_router(self):
        """Another router books, frees, and passes on; now and then its frame is lost."""
        known = [each.request_id for each in self.other.has]
        happening = self.random.choice(["book", "book", "free", "told", "beat", "snapshot", "lost"])
        if happening == "book":
            message = self.other.books(f"o{len(self.entries)}", rank=self.random.choice(WORKERS))
        elif happening == "free" and known:
            message = self.other.frees(self.random.choice(known))
        elif happening == "told" and self.booked:
            message = ProgressTold(self.random.choice(self.booked), PrefillCompleted())
        elif happening == "snapshot":
            (message,) = self.other.snapshot()
        else:
            message = self.other.beats()
        if happening != "lost":
            self.core.handle(ApplyPeer(message), self.now_s)

    def search(self):
        self.core.index.find_matches(Scope(), self._prompt_hashes(IDENTITY))

    def look_often(self):
        """Until an answer is checked by walking."""
        if self.random.random() < 0.2:
            for _ in range(400):
                self.search()

    def prompt(self):
        """Tokens, or now and then the names of their blocks alone."""
        tokens = self.random.choice(PROMPTS)
        if self.random.random() < 0.8:
            return {"token_ids": tokens}
        hashed = prepare(SelectRequest(token_ids=tokens), ()).hashed(IDENTITY)
        return {"sequence_hashes": hashed.sequence_hashes.tolist(), "isl_tokens": len(tokens)}

    def place(self):
        request_id = f"r{len(self.entries)}"
        wanted = OVERRIDES[len(self.entries) % len(OVERRIDES)]
        override = self.random.choice([None, None, wanted])
        request = SelectRequest(
            **self.prompt(),
            request_id=request_id,
            allowed_worker_ids=self.random.choice([None, None, [1, 2], [8]]),
            lora_name=self.random.choice([None, None, "ad"]),
            affinity_target=self.random.choice([None, None, RankTarget(1, 0)]),
            routing_constraints=self.random.choice([None, None, PREFERS_A]),
            router_config_override=override,
        )
        kind = self.random.choice(["select", "reserve", "book", "submit", "submit", "new"])
        prompt = prepare(request, self.core.identities(request.scope))
        if kind == "select":
            self.core.handle(Select(request, prompt), self.now_s)
        elif kind == "reserve":
            rank, _ = self._any_rank()
            asked = ReserveRequest(
                token_ids=request.token_ids,
                sequence_hashes=request.sequence_hashes,
                isl_tokens=request.isl_tokens,
                request_id=request_id,
                lora_name=request.lora_name,
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
            )
            self.core.handle(Reserve(asked, prompt), self.now_s)
            self.booked.append(request_id)
        elif kind == "submit":
            self.core.handle(Submit(request, prompt), self.now_s)
            self.booked.append(request_id)
        else:
            fields = {name: getattr(request, name) for name in request.__struct_fields__}
            asked = NewCommand(**fields) if kind == "new" else request
            self.core.handle(SelectAndReserve(asked, prompt), self.now_s)
            self.booked.append(request_id)

    def rush(self):
        """More than a worker can take at once."""
        rank, _ = self._any_rank()
        for each in range(4):
            request = SelectRequest(
                token_ids=self.random.choice(PROMPTS),
                request_id=f"s{len(self.entries)}.{each}",
                allowed_worker_ids=[rank.worker_id],
                tenant=self.random.choice([None, "a", "b"]),
                policy_class=self.random.choice([None, "fast"]),
                strict_priority=self.random.choice([0, 0, 1]),
                max_wait_s=self.random.choice([None, 1.0]),
            )
            prompt = prepare(request, self.core.identities(request.scope))
            self.core.handle(Submit(request, prompt), self.now_s)
            self.booked.append(request.request_id)

    def admit(self):
        while self.core.handle(Admit(), self.now_s)[0] and self.random.random() < 0.8:
            pass

    def hang_up(self):
        self.core.handle(
            Withdraw(self.random.choice([*self.core.waiting.tickets.values(), 999])), 0.0
        )

    def progress(self):
        request_id = self.random.choice([*self.booked, "nobody's"])
        step = self.random.choice(["prefill", "output", "output", "free"])
        in_batch = self.random.random() < 0.3
        if step == "prefill":
            self.core.handle(PrefillComplete(request_id, in_batch=in_batch), self.now_s)
        elif step == "output":
            decay = self.random.choice([None, 0.3])
            self.core.handle(OutputBlock(request_id, decay, in_batch=in_batch), self.now_s)
        else:
            self.core.handle(Free(request_id), self.now_s)

    def _any_rank(self):
        return self.random.choice(sorted(self.journals.items()))

    def _hashes(self, identity):
        return self._prompt_hashes(identity).tolist()

    def _prompt_hashes(self, identity):
        request = SelectRequest(token_ids=self.random.choice(PROMPTS))
        return prepare(request, ()).hashed(identity).sequence_hashes
