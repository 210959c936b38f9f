"""Choices, bookings and draws equal those of the reference model, whatever a request contains."""

from random import Random

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.api.sessions import LocalSessions, SessionStep
from router.core import commands
from router.core.fleet import LivenessLimits
from router.core.selections import SelectionLimits, Selections
from router.errors import KvRouterError
from router.indexer.approximate import ApproximateLimits
from router.indexer.base import NO_OVERLAP, Overlap
from router.indexer.predictions import EstimateLimits
from router.protocol.catalogue import WorkerLabels
from router.protocol.requests import (
    BlockMmInfo,
    ConfigOverride,
    MmObject,
    RankTarget,
    ReserveRequest,
    RoutingConstraints,
    SelectRequest,
)
from router.protocol.values import SCHEME, Identity, Tier
from router.scheduler.affinity import AffinityTable
from router.scheduler.busy import BusyThresholds
from router.scheduler.eligibility import EligibilitySettings
from router.scheduler.queue.waiting_room import Queueing
from router.sequence import rank_table as columns
from router.sequence.active.prompt import prepare
from support.chaos.fuzzing import examples
from support.values.builders import World
from support.values.policy_costs import POLICIES
from support.values.reference_model import ReferenceModel, Refused, Settings

PROMPT = list(range(40))
IDENTITIES = (Identity(SCHEME, 4), Identity(SCHEME, 8), Identity(SCHEME, 4, eagle=True))
IDS = st.sampled_from("abcdefghijkl")
WORKER_IDS = st.integers(1, 4)
UNKNOWN = 99
FOREVER_S = 1e9

optional = st.none


def some_of(fields, most):
    """A few of these fields at a time: with many, no rank would be left."""
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({n: fields[n] for n in names}))


taints = st.sampled_from(["x", "y", "dynamo.topology/zone=a", "dynamo.topology/zone=b"])
labels = st.builds(
    WorkerLabels,
    taints=st.lists(st.sampled_from("xy"), max_size=2, unique=True),
    topology_domains=st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}]),
    kv_transfer_domain=st.sampled_from([None, "zone"]),
    kv_transfer_enforcement=st.sampled_from([None, "preferred", "required"]),
    lora_names=st.sampled_from([None, None, ["l1"], ["l1", "l2"]]),
    max_gpu_lora_count=st.sampled_from([None, 1, 2]),
)
workers = st.fixed_dictionaries(
    {
        "identity": st.sampled_from(IDENTITIES[:1] * 4 + IDENTITIES),
        "role": st.sampled_from(["aggregated"] * 6 + ["prefill", "decode"]),
        "labels": labels,
        "data_parallel_size": st.integers(1, 2),
        "routing_group": st.sampled_from(["default"] * 4 + ["other"]),
    }
)
policies = st.sampled_from([*POLICIES, *["predictive"] * 6])
queues = st.sampled_from(["fcfs", "lcfs", "wspt", "deadline"])
thresholds = st.tuples(st.sampled_from([0.2, 0.6]), st.sampled_from([10, 40]), st.just(0.05))

overrides = st.builds(
    ConfigOverride,
    policy=optional() | policies,
    router_temperature=st.sampled_from([None, None, None, 0.0, 0.3, 2.0]),
    overlap_score_weight=st.sampled_from([None, None, 0.0, 2.0]),
    prefill_load_scale=st.sampled_from([None, 0.5]),
    overlap_score_credit=st.sampled_from([None, 0.5]),
    shared_cache_multiplier=st.sampled_from([None, 0.5]),
    track_prefill_tokens=st.sampled_from([None, None, True, False]),
    assume_kv_reuse=st.sampled_from([None, None, True, False]),
)
rank_targets = st.builds(RankTarget, WORKER_IDS, optional() | st.integers(0, 1))
constraints = st.builds(
    RoutingConstraints,
    required_taints=st.lists(taints, max_size=1),
    preferred_taints=st.dictionaries(taints, st.sampled_from([-1.0, 0.5, 2.0]), max_size=2),
)
prompts = st.builds(
    lambda known, more, variant: {
        "token_ids": PROMPT[:known] + [100 + each for each in range(more)],
        **variant,
    },
    st.sampled_from([4, 9, 24, 40]),
    st.integers(0, 30),
    st.sampled_from(
        [
            *[{}] * 6,
            {"lora_name": "l1"},
            {"lora_name": "l2", "cache_salt": "s"},
            {"cache_salt": "s"},
            {"block_mm_infos": [None, BlockMmInfo([MmObject(7)])]},
        ]
    ),
)
loads = {
    "phase": st.sampled_from(["prefill", "decode", "aggregated"]),
    "expected_output_tokens": st.integers(1, 90),
    "router_config_override": overrides,
}
queueing = {
    "tenant": st.sampled_from("tu"),
    "fair_share_id": st.sampled_from("xy"),
    "policy_class": st.just("unknown"),
    "strict_priority": st.integers(0, 1),
    "priority_jump": st.sampled_from([0.0, 2.0]),
    "max_wait_s": st.sampled_from([1.0, 3.0]),
}
demands = {
    **loads,
    **queueing,
    "routing_group": st.just("other"),
    "allowed_worker_ids": st.lists(WORKER_IDS, min_size=2),
    "excluded_worker_ids": st.lists(WORKER_IDS, max_size=1),
    "pinned_worker": rank_targets,
    "affinity_target": rank_targets,
    "session_id": st.sampled_from(["one", "two"]),
    "session_is_hint": st.booleans(),
    "session_is_final": st.booleans(),
    "routing_constraints": constraints,
    "prefill_worker_id": st.sampled_from([1, 1, 1, 2, 2, UNKNOWN]),
    "explain": st.booleans(),
    "advisory": st.booleans(),
    "kv_hint": st.just({"any": "thing"}),
}
SESSION = st.fixed_dictionaries({"session_id": st.sampled_from(["one", "two"])})
BESIDE_SESSION = {
    "pinned_worker": rank_targets,
    "session_is_hint": st.just(True),
    "session_is_final": st.just(True),
}
FOCUSES = {
    "all": some_of(demands, most=4),
    "queue": some_of({**queueing, "pinned_worker": rank_targets}, most=3),
    "sessions": st.builds(dict.__or__, SESSION, some_of(BESIDE_SESSION, most=2)),
}
forms = st.sampled_from(["tokens"] * 4 + ["hashes", "names"])
decays = optional() | st.sampled_from([0.0, 0.25, 1.0])
steps_s = st.integers(0, 8).map(lambda eighths: eighths / 8)


class AgainstReference(RuleBasedStateMachine):
    """Time is in eighths of a second, so that sums of times are exact in any order."""

    @initialize(
        fleet=st.lists(workers, min_size=3, max_size=4),
        policy=policies,
        busy=optional() | thresholds,
        is_hard=st.booleans(),
        lora_weight=st.sampled_from([0.0, 1.0]),
        focus=st.sampled_from(sorted(FOCUSES)),
        threshold_frac=st.sampled_from([None, 0.05]),
        order=queues,
        has_guesses=st.booleans(),
    )
    def begin(self, fleet, policy, focus, **fields):
        if focus == "queue":
            fields |= {"threshold_frac": 0.0, "busy": None}
            fleet = [{**each, "routing_group": "default"} for each in fleet[:2]]
        self.settings, self.policy, self.demands = Settings(**fields), policy, FOCUSES[focus]
        self.now_s, self.rng, self.tickets = 1.0, Random(5), {}
        self.world = self.started()
        self.core = self.world.core
        self.workers = {
            worker_id: self.world.worker(
                worker_id, total_kv_blocks=20, max_num_batched_tokens=600, **each
            )
            for worker_id, each in enumerate(fleet, 1)
        }
        self.model = ReferenceModel(
            self.workers, lambda rank: self.core.ranks.row(rank).tolist(), self.settings
        )
        for rank in self.model.ranks:
            row = self.core.ranks.row(rank)
            row[columns.BASE_S : columns.KV_S + 1] = [0.02, 1e-2, 2e-7, 2e-4, 2e-8]
            row[columns.REQUESTS_PER_S : columns.REUSE + 1] = [rank.worker_id, 0.1, 30, 0.5]
        for scope in {each.scope for each in self.workers.values()}:  # from now on turns count
            asked = SelectRequest(token_ids=[1], routing_group=scope.routing_group)
            self.core.weigh(asked, prepare(asked, ()), 0.0)
        selections = Selections(SelectionLimits())
        sessions = LocalSessions(AffinityTable(FOREVER_S, 100))
        is_hard = self.settings.is_hard
        self.sessions = SessionStep(self.core, sessions, selections, is_hard=is_hard)

    def started(self):
        known, busy = self.settings, BusyThresholds()
        if known.busy is not None:
            decode, tokens, steps = known.busy
            busy = BusyThresholds(
                active_decode_blocks_threshold=decode,
                active_prefill_tokens_threshold=tokens,
                active_prefill_tokens_threshold_frac=steps,
            )
        return World(
            rng=self.rng,
            default_policy=self.policy,
            estimates=EstimateLimits(
                ApproximateLimits(FOREVER_S, 1000, 0.8) if known.has_guesses else None
            ),
            gate=EligibilitySettings(busy, known.hysteresis, known.is_hard, known.lora_weight),
            queueing=Queueing(threshold_frac=known.threshold_frac, policy=known.order),
            liveness=LivenessLimits(FOREVER_S, FOREVER_S, FOREVER_S),
            reservation_ttl_s=known.ttl_s,
        )

    # ── What callers and engines do ──────────────────────────────────────────────────────────────

    @rule(tier=st.sampled_from(Tier), data=st.data(), prompt=prompts)
    def cache(self, tier, data, prompt):
        rank = data.draw(st.sampled_from(self.model.ranks))
        request = SelectRequest(**prompt)
        hashes = self.model.hashed(rank, request).sequence_hashes.tolist()
        self.model.held[rank][tier].update(hashes)
        if hashes:
            self.world.journals[rank].stored(tier, hashes, None)
            self.world.deliver(rank, self.now_s)

    @rule(prompt=prompts, data=st.data(), form=forms, is_hashed=st.booleans())
    def select(self, prompt, data, form, is_hashed):
        request = self.request(prompt, form, **data.draw(self.demands))
        command = self.sessions.before(commands.Select(request))
        self.decide(commands.Select, request, command.request, is_hashed=is_hashed)

    @rule(request_id=IDS, prompt=prompts, data=st.data(), form=forms, is_hashed=st.booleans())
    def submit(self, request_id, prompt, data, form, is_hashed):
        request = self.request(prompt, form, request_id=request_id, **data.draw(self.demands))
        directed = self.sessions.before(commands.Submit(request)).request
        if request_id in self.model.bookings or request_id in self.tickets:
            with pytest.raises(KvRouterError, match=request_id):
                self.core.handle(commands.Submit(directed, self.prompt(directed)), self.now_s)
            return
        if self.settings.threshold_frac is None:
            self.decide(commands.Submit, request, directed, is_hashed=is_hashed)
        elif self.model.may_pass(directed):
            placement = self.decide(commands.Submit, request, directed, is_hashed=is_hashed)
            if placement is not None:
                cost, tenant = placement.uncached_tokens, directed.tenant or ""
                own, shares = directed.fair_share_id or "", self.model.shares[request.scope]
                shares.charge_both(tenant, own, cost, self.now_s)
        else:
            self.wait(directed)
        self.admit()

    @rule(request_id=IDS, prompt=prompts, data=st.data(), wanted=some_of(loads, most=2))
    def reserve(self, request_id, prompt, data, wanted):
        rank = data.draw(st.sampled_from(self.model.ranks))
        is_there = rank.worker_id not in self.model.cordoned
        if request_id in self.model.bookings or request_id in self.tickets or not is_there:
            return
        worker_id, dp_rank = rank.worker_id, rank.dp_rank
        group = self.workers[worker_id].routing_group
        request = ReserveRequest(
            worker_id=worker_id, dp_rank=dp_rank, request_id=request_id, routing_group=group,
            **prompt, **wanted,
        )  # fmt: skip
        self.core.handle(commands.Reserve(request, self.prompt(request)), self.now_s)
        hashes = self.model.hashed(rank, request).sequence_hashes.tolist()
        self.model.add(request, rank, self.model.overlap(rank, hashes)[0], self.now_s)
        self.admit()

    @precondition(lambda self: self.model.bookings)
    @rule(data=st.data(), in_batch=st.booleans())
    def complete(self, data, in_batch):
        request_id = self.drawn_id(data)
        command = commands.PrefillComplete(request_id, None, in_batch)
        self.core.handle(command, self.now_s)
        self.model.complete(request_id, self.now_s, in_batch=in_batch)
        self.admit()

    @precondition(lambda self: self.model.bookings)
    @rule(
        data=st.data(), decay=optional() | st.sampled_from([0.0, 0.25, 1.0]), in_batch=st.booleans()
    )
    def output_block(self, data, decay, in_batch):
        request_id = self.drawn_id(data)
        self.core.handle(commands.OutputBlock(request_id, decay, in_batch), self.now_s)
        self.model.output_block(request_id, decay, self.now_s, in_batch=in_batch)
        self.admit()

    @precondition(lambda self: self.model.bookings)
    @rule(data=st.data())
    def free(self, data):
        request_id = self.drawn_id(data)
        self.core.handle(commands.Free(request_id), self.now_s)
        self.model.free(request_id, self.now_s)
        self.admit()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def withdraw(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.tickets)))
        self.core.handle(commands.Free(request_id), self.now_s)
        self.tickets.pop(request_id)
        self.model.waiting = [
            each for each in self.model.waiting if each.request.request_id != request_id
        ]

    @rule(worker_id=WORKER_IDS, is_cordoned=st.sampled_from([False, False, True]))
    def order(self, worker_id, is_cordoned):
        lifecycle = "cordoned" if is_cordoned else "schedulable"
        if worker_id in self.workers:
            self.core.handle(commands.OrderWorker(worker_id, lifecycle), self.now_s)
            change = self.model.cordoned.add if is_cordoned else self.model.cordoned.discard
            change(worker_id)

    @rule(passed_s=steps_s)
    def pass_time(self, passed_s):
        self.now_s += passed_s
        self.core.handle(commands.Tick(), self.now_s)
        self.model.tick(self.now_s)
        left = {each.request.request_id for each in self.model.waiting}
        self.tickets = {i: each for i, each in self.tickets.items() if i in left}
        self.admit()

    # ── Both do the same ─────────────────────────────────────────────────────────────────────────

    def request(self, prompt, form, **fields):
        """A request by tokens, by hashes of its blocks, or with names of its caller's own."""
        request = SelectRequest(**prompt, **fields)
        if form == "tokens":
            return request
        identity = next(iter(self.workers.values())).identity
        hashed = prepare(request, ()).hashed(identity)
        fields = {**prompt, **fields, "token_ids": None, "isl_tokens": hashed.isl_tokens}
        fields["sequence_hashes"] = hashed.public_hashes.tolist()
        if form == "names":
            fields["block_hashes"] = hashed.public_hashes.tolist()  # as good as any
            fields["sequence_hashes"] = [each ^ 1 for each in fields["sequence_hashes"]]
        return SelectRequest(**fields)

    def prompt(self, request, *, is_hashed=True):
        identities = {each.identity for each in self.workers.values()}
        return prepare(request, identities if is_hashed or not request.token_ids else ())

    def decide(self, command, request, directed, *, is_hashed):
        """Let both choose, and compare. Returns the placement, or None if it is refused."""
        assert directed.affinity_target == self.model.directed(request)
        prompt = self.prompt(directed, is_hashed=is_hashed)
        dice = Random()
        dice.setstate(self.rng.getstate())
        try:
            expected = self.model.choose(directed, self.policy, dice, self.now_s)
        except Refused as refused:
            self.refuse(command(directed, prompt), refused)
            return None
        placement, _ = self.core.handle(command(directed, prompt), self.now_s)
        self.compare(placement, directed, expected, dice)
        if command is commands.Submit:
            self.book(placement, directed)
        return placement

    def refuse(self, command, refused):
        with pytest.raises(KvRouterError) as caught:
            self.core.handle(command, self.now_s)
        assert caught.value.code == refused.args[0]

    def compare(self, placement, request, expected, dice):
        rank, rows, costs = expected
        table = placement.choice.table
        assert list(table.ranks) == list(rows)
        np.testing.assert_array_equal(table.values, list(rows.values()))
        if placement.choice.policy == "predictive":
            assert placement.choice.costs.tolist() == costs
        else:
            assert placement.choice.costs.tolist() == pytest.approx(costs)
        assert placement.rank == rank
        assert self.rng.getstate() == dice.getstate()
        identity = placement.worker.identity
        alike = [
            each
            for each in self.model.ranks
            if self.model.worker(each).identity == identity
            and self.model.worker(each).scope == request.scope
        ]
        for each in alike:
            hashes = self.model.hashed(each, request).sequence_hashes.tolist()
            held = Overlap(*self.model.overlap(each, hashes))
            assert placement.overlaps.get(each, NO_OVERLAP) == held

    def book(self, placement, request):
        self.model.add(request, placement.rank, placement.overlap_blocks, self.now_s)
        self.model.bind(request, placement.rank)
        self.sessions.bind(request, placement.rank)

    def wait(self, request):
        command = commands.Submit(request, self.prompt(request))
        try:
            self.model.wait(request, self.now_s)
        except Refused as refused:
            self.refuse(command, refused)
            return
        self.tickets[request.request_id], _ = self.core.handle(command, self.now_s)

    def admit(self):
        """Let both admit all waiting requests that have room."""
        while self.model.waiting:
            request, dice = self.model.next_waiting(self.now_s), Random()
            dice.setstate(self.rng.getstate())
            refused = expected = None
            if request is not None:
                try:
                    expected = self.model.choose(request, self.policy, dice, self.now_s)
                except Refused as error:
                    refused = error
            admission, _ = self.core.handle(commands.Admit(), self.now_s)
            if request is None:
                assert admission is None
                return
            assert self.tickets.pop(request.request_id) == admission.ticket
            if refused is not None:
                assert admission.outcome.code == refused.args[0]
            else:
                self.compare(admission.outcome, request, expected, dice)
                self.book(admission.outcome, request)

    def drawn_id(self, data):
        return data.draw(st.sampled_from(sorted(self.model.bookings)))

    @invariant()
    def bookings_are_equal(self):
        if not hasattr(self, "core"):
            return
        self.core.tracker.check_invariants()
        self.core.waiting.check_invariants()
        assert set(self.core.tracker.by_id) == set(self.model.bookings)
        assert self.core.waiting.tickets == self.tickets
        for rank in self.model.ranks:
            row, expected = self.core.ranks.row(rank), self.model.booked_columns(rank)
            assert {each: row[each] for each in expected} == expected


AgainstReference.TestCase.settings = hypothesis_settings(
    max_examples=examples(24), stateful_step_count=50, deadline=None, report_multiple_bugs=False
)
TestAgainstReference = AgainstReference.TestCase
