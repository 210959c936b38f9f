"""What callers read of the state."""

from math import ceil, isnan

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from router.core.commands import Free, OrderWorker, Select, SelectAndReserve, UpsertWorker
from router.core.views import index, workers
from router.core.views.decisions import candidate, explain
from router.indexer.dumps import IndexDump
from router.protocol.dumps import decode_dump
from router.protocol.replies import PotentialLoad, RankOverlap, RemovedRanks, TrustState
from router.protocol.requests import (
    ConfigOverride,
    PotentialLoadsRequest,
    PromptRequest,
    RankTarget,
    SelectRequest,
)
from router.protocol.values import SCHEME, TIERS, Identity, Tier
from router.scheduler.policy._predicted_parts import PREDICTED, PREFILL_OWN_S
from router.scheduler.policy.custom import checked_policy
from router.scheduler.policy.registry import builtin_policies
from router.scheduler.selector import Policy
from router.scheduler.terms import OVERLAP_DEVICE, OVERLAP_REMOTE
from router.sequence.active.prompt import prepare
from router.sequence.hashing.block_hashes import chain
from router.sequence.rank_table import (
    BASE_S,
    FOREIGN_REQUESTS,
    KV_S,
    RATE_ERROR,
    REQUESTS,
    TRUST_WEIGHT,
)
from support.chaos.fuzzing import examples
from support.values.builders import World, announcement, rank

PROMPT = list(range(40))


@pytest.fixture
def world():
    world = World()
    world.worker(1)
    world.worker(2, data_parallel_size=2)
    world.cache(rank(2, 1), PROMPT)
    return world


def decide(world, **fields):
    request = SelectRequest(token_ids=PROMPT, request_id="x", **fields)
    placement = world.core.handle(Select(request, prepare(request, ())), 0.0)[0]
    return explain(world.core, request, placement, now_s=1.0)


def test_decision_shows_its_trust_and_overlap(world):
    decision = decide(world)
    assert (decision.worker_id, decision.dp_rank, decision.endpoint) == (2, 1, "http://w2")
    assert (decision.overlap_blocks, decision.predicted_cached_blocks) == (10, 9)
    assert (decision.effective_prefill_tokens, decision.potential_decode_blocks) == (0, 10)
    assert (decision.isl_tokens, decision.block_size, decision.policy) == (40, 4, "dynamo-1.0")
    assert (decision.trust.state, decision.trust.event_id) == (TrustState.EXACT, 1)
    overlap = decision.overlap
    assert (overlap.longest_matched, overlap.gpu, overlap.cpu, overlap.disk) == (40, 40, 40, 40)
    assert overlap.dp == {"0": 0, "1": 40}


def test_overlap_is_cumulative_over_tiers(world):
    journal = world.journals[rank(1)]
    hashes = (
        prepare(SelectRequest(token_ids=PROMPT), ())
        .hashed(journal.identity)
        .sequence_hashes.tolist()
    )
    journal.stored(Tier.DEVICE, hashes[:2], None)
    journal.stored(Tier.HOST, hashes[2:5], hashes[1])
    journal.stored(Tier.REMOTE, hashes[5:6], hashes[4])
    world.deliver(rank(1))
    overlap = decide(world, allowed_worker_ids=[1]).overlap
    assert (overlap.gpu, overlap.cpu, overlap.disk, overlap.remote) == (8, 20, 20, 24)
    assert overlap.longest_matched == 24


def test_candidates_are_shown_on_request_only(world):
    assert decide(world).candidates is None
    candidates = decide(world, explain=True).candidates
    assert [(c.worker_id, c.dp_rank) for c in candidates] == [(1, 0), (2, 0), (2, 1)]
    assert [c.cost for c in candidates] == [20.0, 20.0, 10.0]
    assert candidates[2].held_blocks == 10


@pytest.mark.parametrize("policy", [policy.name for policy in builtin_policies()])
def test_an_explanation_adds_up_whatever_the_policy(world, policy):
    override = ConfigOverride(policy=policy)
    decision = decide(world, explain=True, router_config_override=override)
    assert decision.policy == policy
    for each in decision.candidates:
        assert sum(each.parts.values()) == pytest.approx(each.cost)
    assert sum(each.chance for each in decision.candidates) == pytest.approx(1)


def test_an_explanation_has_every_term_of_every_candidate(world):
    world.core.handle(
        SelectAndReserve(
            request := SelectRequest(token_ids=PROMPT, request_id="there", allowed_worker_ids=[1]),
            prepare(request, ()),
        ),
        0.0,
    )
    one, _, best = decide(world, explain=True).candidates
    assert one.parts == {"prefill_blocks": 20.0, "decode_blocks": 10.0}
    assert (one.active_requests, one.potential_decode_blocks) == (1, 10)
    assert (best.device_blocks, best.host_pinned_blocks, best.disk_blocks) == (10, 10, 10)
    assert (best.chance, best.trust_weight) == (1.0, 1.0)
    first = one.predicted
    parts = first.queue_s + first.room_s + first.prefill_s
    assert first.time_to_first_token_s == pytest.approx(parts)
    assert first.queue_s > best.predicted.queue_s == 0.0
    assert first.delay_s > best.predicted.delay_s == 0.0
    assert first.relative_error > 0
    assert all(rate > 0 for rate in msgspec.structs.astuple(first.rates))


def test_explanation_names_removed_ranks_and_their_filters(world):
    world.worker(3)
    world.core.handle(OrderWorker(3, "cordoned"), 0.0)
    override = ConfigOverride(overlap_score_weight=0, router_temperature=0.5)
    decision = decide(
        world, explain=True, allowed_worker_ids=[2, 3], router_config_override=override
    )
    assert [(c.worker_id, c.dp_rank) for c in decision.candidates] == [(2, 0), (2, 1)]
    assert decision.explanation.removed == [
        RemovedRanks("not schedulable (cordoned)", 1, ["3.0"]),
        RemovedRanks("allowed_worker_ids", 1, ["1.0"]),
    ]
    said = decision.explanation.settings
    assert (said["prefill_load_scale"], said["overlap_score_credit"]) == (0.0, 0.0)
    assert (said["router_temperature"], said["delay_weight"]) == (0.5, 0.1)


def test_ranks_removed_by_a_policy_are_named_with_it():
    class NotTheFirst(Policy):
        name = "not-the-first"

        def filter(self, table, settings):
            return np.arange(len(table)) > 0

        def score(self, table, settings):
            return np.zeros(len(table))

    world = World(selectors=[checked_policy("here", NotTheFirst()), *builtin_policies()])
    for worker_id in (1, 2):
        world.worker(worker_id)
    override = ConfigOverride(policy="not-the-first")
    decision = decide(world, explain=True, router_config_override=override)
    assert decision.explanation.removed == [RemovedRanks("policy not-the-first", 1, ["1.0"])]


def test_a_reply_leaves_out_what_it_does_not_have(world):
    body = msgspec.to_builtins(decide(world))
    assert "candidates" not in body
    assert body["trust"]["state"] == "exact"


def test_loads_are_what_is_booked(world):
    world.book("a", PROMPT, allowed_worker_ids=[1])
    (scope,) = workers.loads(world.core)
    assert scope.loads == [
        PotentialLoad(1, 0, 40, 10, 1),
        PotentialLoad(2, 0, 0, 0, 0),
        PotentialLoad(2, 1, 0, 0, 0),
    ]


def test_potential_loads_add_the_prompt(world):
    world.book("a", PROMPT, allowed_worker_ids=[1])
    request = PotentialLoadsRequest(token_ids=PROMPT)
    assert workers.potential_loads(world.core, request, prepare(request, ()), 0.0) == [
        PotentialLoad(1, 0, 80, 10, 1),
        PotentialLoad(2, 0, 40, 10, 0),
        PotentialLoad(2, 1, 0, 10, 0),
    ]


def test_overlap_scores_name_every_rank(world):
    request = PromptRequest(token_ids=PROMPT)
    scores = workers.overlap_scores(world.core, request, prepare(request, ()), now_s=1.0)
    assert (scores.block_size, scores.num_blocks) == (4, 10)
    assert [(o.worker_id, o.dp_rank, o.device_blocks) for o in scores.workers] == [
        (1, 0, 0), (2, 0, 0), (2, 1, 10),
    ]  # fmt: skip


def test_overlap_scores_name_ranks_of_unschedulable_workers(world):
    world.core.handle(OrderWorker(2, "cordoned"), 0.0)
    request = PromptRequest(token_ids=PROMPT)
    scores = workers.overlap_scores(world.core, request, prepare(request, ()), now_s=1.0)
    assert [o.device_blocks for o in scores.workers] == [0, 0, 10]


def test_overlap_scores_of_an_unknown_scope_are_empty(world):
    request = PromptRequest(token_ids=PROMPT, model_name="zz")
    scores = workers.overlap_scores(world.core, request, prepare(request, ()), now_s=1.0)
    assert scores.workers == []


class Held:
    """A world, and the blocks and bookings of its ranks in sets."""

    def __init__(self, workers, changes):
        self.world, self.identities, self.held, self.booked = World(), {}, {}, {}
        for worker_id, (identity, ranks) in enumerate(workers, 1):
            announced = self.world.worker(worker_id, identity=identity, data_parallel_size=ranks)
            for each in announced.ranks:
                self.identities[each] = identity
                self.held[each], self.booked[each] = [set() for _ in Tier], set()
        for number, change in enumerate(changes):
            self.change(number, *change)

    def hashes(self, of, token_ids):
        prompt = prepare(SelectRequest(token_ids=token_ids), ())
        return prompt.hashed(self.identities[of]).sequence_hashes.tolist()

    def change(self, number, what, position, blocks):
        at = list(self.identities)[position % len(self.identities)]
        tokens = PROMPT[: 4 * blocks]
        if what == "book":
            target = RankTarget(at.worker_id, at.dp_rank)
            self.world.book(f"b{number}", tokens, pinned_worker=target)
            self.booked[at].update(self.hashes(at, tokens))
        elif hashes := self.hashes(at, tokens):
            self.held[at][what].update(hashes)
            self.world.journals[at].stored(what, hashes, None)
            self.world.deliver(at)

    def overlaps(self, of, token_ids):
        """Leading blocks of the prompt in each cumulative tier."""
        known = [set().union(*self.held[of][: tier + 1]) for tier in range(TIERS)]
        return [leading(self.hashes(of, token_ids), held) for held in known]


def leading(hashes, held):
    return next((i for i, each in enumerate(hashes) if each not in held), len(hashes))


CHANGES = st.tuples(st.sampled_from([*Tier, "book"]), st.integers(0, 11), st.integers(1, 10))
WORKERS = st.tuples(
    st.builds(Identity, st.just(SCHEME), st.sampled_from([4, 8]), st.booleans()), st.integers(1, 3)
)
PROMPTS = st.integers(1, 40).map(lambda tokens: [*PROMPT[:tokens], 7])
SLOW_MODEL = hypothesis_settings(max_examples=examples(100), deadline=None)


@SLOW_MODEL
@given(st.lists(WORKERS, min_size=1, max_size=4), st.lists(CHANGES, max_size=9), PROMPTS)
def test_overlap_scores_and_loads_equal_slow_model(fleet, changes, token_ids):
    model = Held(fleet, changes)
    core, request = model.world.core, PotentialLoadsRequest(token_ids=token_ids)
    scores, booked, potential = [], [], []
    for each, identity in model.identities.items():
        device, host, disk, remote = model.overlaps(each, token_ids)
        size, hashes = identity.block_size, model.hashes(each, token_ids)
        cached = max(min(remote, (len(token_ids) - 1) // size) - identity.eagle, 0)
        more = (host - device, disk - host, core.trust(each, 1.0))
        blocks = (size, len(hashes), cached, device, host, disk, remote)
        scores.append(RankOverlap(each.worker_id, each.dp_rank, *blocks, *more))
        active, new = core.tracker.active(each), ceil(len(token_ids) / size)
        tokens, held = active.active_prefill_tokens, active.active_blocks
        load = (tokens, held, active.active_requests)
        booked.append(PotentialLoad(each.worker_id, each.dp_rank, *load))
        new_tokens = max(len(token_ids) - size * device, 0)
        held += new - leading(hashes, model.booked[each])
        load = (tokens + new_tokens, held, active.active_requests)
        potential.append(PotentialLoad(each.worker_id, each.dp_rank, *load))
    prompt = prepare(request, ())
    assert workers.overlap_scores(core, request, prompt, 1.0).workers == scores
    assert workers.loads(core)[0].loads == booked
    assert workers.potential_loads(core, request, prepare(request, ()), 1.0) == potential


@SLOW_MODEL
@given(
    st.lists(WORKERS, min_size=1, max_size=4),
    st.lists(CHANGES, max_size=9),
    PROMPTS,
    st.sampled_from([policy.name for policy in builtin_policies()]),
)
def test_explained_candidates_equal_slow_model(fleet, changes, token_ids, policy):
    core = Held(fleet, changes).world.core
    override = ConfigOverride(policy=policy)
    asked = SelectRequest(token_ids=token_ids, router_config_override=override, explain=True)
    placement = core.handle(Select(asked, prepare(asked, ())), 0.0)[0]
    why, table = core.explain(asked, placement), placement.choice.table
    shown = explain(core, asked, placement, 1.0).candidates
    assert len(shown) == len(table)
    used = [name for i, name in enumerate(why.reasons.names) if why.reasons.parts[:, i].any()]
    for i, each in enumerate(shown):
        plain = candidate(core, table.terms(i), float(placement.choice.costs[i]), 1.0)
        assert [getattr(each, name) for name in plain.__struct_fields__] == [*astuple(plain)]
        parts = dict(zip(why.reasons.names, why.reasons.parts[i].tolist(), strict=True))
        assert each.parts == {name: parts[name] for name in used or why.reasons.names[:1]}
        chance, row = float(why.reasons.chances[i]), table.values[i].tolist()
        assert each.chance == chance or (each.chance is None and isnan(chance))
        overlaps = (each.device_blocks, each.host_pinned_blocks, each.disk_blocks)
        assert [*overlaps, each.remote_blocks] == row[OVERLAP_DEVICE : OVERLAP_REMOTE + 1]
        assert each.trust_weight == row[TRUST_WEIGHT]
        assert each.active_requests == row[REQUESTS] + row[FOREIGN_REQUESTS]
        seconds = why.predicted_s[i].tolist()
        assert [getattr(each.predicted, name) for name in PREDICTED] == seconds[: len(PREDICTED)]
        assert each.predicted.time_to_first_token_s == sum(seconds[: PREFILL_OWN_S + 1])
        assert each.predicted.relative_error == row[RATE_ERROR]
        assert [*astuple(each.predicted.rates)] == row[BASE_S : KV_S + 1]


def lifecycles(world):
    return {v.worker_id: v.lifecycle for v in workers.workers(world.core, now_s=1.0)}


def test_workers_show_their_state(world):
    world.core.handle(UpsertWorker(announcement(3)), 0.0)
    world.core.handle(OrderWorker(1, "cordoned"), 0.0)
    assert lifecycles(world) == {1: "cordoned", 2: "schedulable", 3: "incomplete"}
    worker = workers.workers(world.core, now_s=1.0)[2]
    assert worker.not_schedulable_reasons == ["announced, but no report received yet"]


def test_a_draining_worker_is_drained_when_its_last_request_ended(world):
    world.book("a", PROMPT, allowed_worker_ids=[1])
    world.core.handle(OrderWorker(1, "draining"), 0.0)
    assert lifecycles(world)[1] == "draining"
    world.core.handle(Free("a"), 0.0)
    assert lifecycles(world)[1] == "drained"


def test_workers_show_reported_and_booked_load(world):
    world.book("a", PROMPT, allowed_worker_ids=[1])
    view = workers.workers(world.core, now_s=1.0)[0].ranks[0]
    assert (view.active_requests, view.active_prefill_tokens, view.active_decode_blocks) == (
        1,
        40,
        10,
    )
    assert view.reported.running_requests == 2


def dumped(core):
    dump = IndexDump(core.index.event_ids(), list(core.dump_slices()))
    return list(index.dump_pieces(dump, index.block_sizes(core)))


def test_an_empty_dump_is_a_dump():
    assert decode_dump(b"".join(dumped(World().core))) == []


def test_a_long_dump_comes_in_pieces(world, monkeypatch):
    whole = b"".join(dumped(world.core))
    monkeypatch.setattr(index, "PIECE_BLOCKS", 3)
    pieces = dumped(world.core)
    assert b"".join(pieces) == whole
    assert max(piece.count(b"block_hash") for piece in pieces) == 3


def test_dump_is_everything_held(world):
    world.worker(3, routing_group="other")
    world.cache(rank(3), PROMPT[:4])
    dump = dumped(world.core)
    assert [(r.rank, r.event_id, len(r.blocks[0])) for r in decode_dump(b"".join(dump))] == [
        (rank(2, 1), 1, 10),
        (rank(3), 1, 1),
    ]
    dump = msgspec.json.decode(b"".join(dump))
    assert set(dump) == {"default:default", "default:other"}
    (event,) = dump["default:default"]["events"]
    assert (event["worker_id"], event["event"]["dp_rank"], event["storage_tier"]) == (
        2,
        1,
        "device",
    )
    blocks = event["event"]["data"]["stored"]["blocks"]
    assert len(blocks) == 10
    assert blocks[0]["tokens_hash"] is None
    assert dump["default:other"]["block_size"] == 4
    assert chain([1]).tolist() == [1]
