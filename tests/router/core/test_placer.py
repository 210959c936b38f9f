"""A placement equals that of a slow model, whatever the request, the fleet and the policy."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from router.core.commands import RemoveWorker, Select
from router.core.views.decisions import explain
from router.indexer.approximate import ApproximateLimits
from router.indexer.base import Overlap
from router.indexer.concurrent import ConcurrentIndex
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.catalogue import WorkerLabels
from router.protocol.replies import BlockSource
from router.protocol.requests import ConfigOverride, RankTarget, RoutingConstraints, SelectRequest
from router.protocol.values import SCHEME, TIERS, Identity, Tier
from router.scheduler.terms import (
    NEW_BLOCKS,
    OVERLAP_DEVICE,
    OVERLAP_REMOTE,
    TAINT_FACTOR,
)
from router.sequence import rank_table as columns
from router.sequence.active.prompt import prepare
from support.chaos.fuzzing import examples
from support.values.builders import BLOCK_SIZE, World, rank
from support.values.terms import predicted_costs

PROMPT = list(range(40))
WORKERS = (1, 2, 3, 4)
IDENTITIES = (Identity(SCHEME, 4), Identity(SCHEME, 8), Identity(SCHEME, 4, eagle=True))
POLICIES = ("predictive", "dynamo-1.0", "least-loaded", "lmetric")


class Model:
    """A world, and what a slow reader knows of it: sets of blocks, and the rows of ranks."""

    def __init__(self, identities, **fields):
        self.world = World(**fields)
        self.identities = dict(zip(WORKERS, identities, strict=False))
        for worker_id, identity in self.identities.items():
            self.world.worker(worker_id, identity=identity, total_kv_blocks=20)
            row = self.world.core.ranks.row(rank(worker_id))
            row[columns.BASE_S : columns.KV_S + 1] = [0.02, 1e-4, 2e-9, 2e-4, 2e-8]
            row[columns.REQUESTS_PER_S : columns.REUSE + 1] = [worker_id, 0.1, 30, 0.5]
        self.held = {worker_id: [set() for _ in Tier] for worker_id in self.identities}
        self.booked = {worker_id: set() for worker_id in self.identities}

    def hashes(self, worker_id, token_ids):
        hashed = prepare(SelectRequest(token_ids=token_ids), ()).hashed(self.identities[worker_id])
        return hashed.sequence_hashes.tolist()

    def cache(self, worker_id, tier, token_ids):
        hashes = self.hashes(worker_id, token_ids)
        self.held[worker_id][tier].update(hashes)
        if hashes:
            self.world.journals[rank(worker_id)].stored(tier, hashes, None)
            self.world.deliver(rank(worker_id))

    def book(self, number, worker_id, token_ids):
        self.world.book(f"r{number}", token_ids, allowed_worker_ids=[worker_id])
        self.booked[worker_id].update(self.hashes(worker_id, token_ids))

    def overlap(self, worker_id, hashes, guesses):
        """The longest prefix in each cumulative tier; guesses alone count for their own part."""
        known = [
            leading(hashes, set().union(*self.held[worker_id][: tier + 1])) for tier in range(TIERS)
        ]
        guessed = leading(hashes, self.booked[worker_id]) if guesses else 0
        return [max(each, guessed) for each in known]

    def terms(self, worker_id, request, factor, *, guesses):
        """A candidate's row."""
        identity, isl_tokens = self.identities[worker_id], len(request.token_ids)
        hashes = self.hashes(worker_id, request.token_ids)
        overlap = self.overlap(worker_id, hashes, guesses)
        reusable = min(overlap[0], max(isl_tokens - 1, 0) // identity.block_size)
        cached = max(reusable - identity.eagle, 0)
        blocks = math.ceil(isl_tokens / identity.block_size)
        new = blocks - leading(hashes, self.booked[worker_id])
        row = self.world.core.ranks.row(rank(worker_id)).tolist()
        if request.phase is not None:
            row[columns.DECODE_SIDE] = float(request.phase == "decode")
        return [*row, *overlap, cached, new, factor]


def leading(hashes, held):
    return next((i for i, each in enumerate(hashes) if each not in held), len(hashes))


def costs_of(policy, rows, isl_tokens, expected, now_s):
    """Each candidate's cost, by the formulas in the scheduler's README."""
    if policy == "predictive":
        return predicted_costs(rows, isl_tokens, expected, now_s)
    return [
        COSTS[policy](row, rows, isl_tokens, expected, now_s) * row[TAINT_FACTOR] for row in rows
    ]


def uncached(row, isl_tokens):
    return max(isl_tokens - row[OVERLAP_DEVICE] * row[columns.BLOCK_SIZE], 0)


def dynamo_cost(row, _rows, isl_tokens, _expected, _now_s):
    prefill = (row[columns.PREFILL_TOKENS] + uncached(row, isl_tokens)) / row[columns.BLOCK_SIZE]
    return prefill + row[columns.DECODE_BLOCKS] + row[NEW_BLOCKS]


def lmetric_cost(row, _rows, isl_tokens, _expected, _now_s):
    return (row[columns.PREFILL_TOKENS] + uncached(row, isl_tokens)) * (row[columns.REQUESTS] + 1)


COSTS = {
    "dynamo-1.0": dynamo_cost,
    "lmetric": lmetric_cost,
    "least-loaded": lambda row, *_: row[columns.REQUESTS],
}


def place(world, request, now_s, *, is_hashed=False):
    identities = world.core.identities(request.scope) if is_hashed else ()
    return world.core.handle(Select(request, prepare(request, identities)), now_s)[0]


prompts = st.builds(
    lambda known, more: PROMPT[:known] + [100 + each for each in range(more)],
    st.integers(0, 40),
    st.integers(0, 30),
).filter(len)
steps = st.lists(
    st.tuples(st.sampled_from([*Tier, "book"]), st.integers(0, 3), prompts), max_size=8
)
fleets = st.lists(st.sampled_from(IDENTITIES[:1] * 4 + IDENTITIES), min_size=1, max_size=4)
demands = st.fixed_dictionaries(
    {},
    optional={
        "allowed_worker_ids": st.lists(st.sampled_from(WORKERS), min_size=1),
        "excluded_worker_ids": st.lists(st.sampled_from(WORKERS), max_size=2),
        "expected_output_tokens": st.integers(1, 90),
        "phase": st.sampled_from(["decode", "aggregated"]),
        "lora_name": st.none(),
    },
)


def candidates_of(model, wanted):
    allowed = wanted.get("allowed_worker_ids", WORKERS)
    return [
        worker_id
        for worker_id in model.identities
        if worker_id in allowed and worker_id not in wanted.get("excluded_worker_ids", ())
    ]


@hypothesis_settings(max_examples=examples(150), deadline=None)
@given(fleets, steps, prompts, demands, st.sampled_from(POLICIES), st.booleans(), st.booleans())
def test_placement_equals_slow_model(
    identities, taken, token_ids, wanted, policy, is_hashed, has_guesses
):
    guesses = ApproximateLimits(1e9, 1000, 0.8) if has_guesses else None
    model = Model(identities, prediction=guesses)
    for number, (step, index, prompt) in enumerate(taken):
        worker_id = WORKERS[index % len(identities)]
        if step == "book":
            model.book(number, worker_id, prompt)
        else:
            model.cache(worker_id, step, prompt)
    expected = candidates_of(model, wanted)
    if not expected:
        return
    core, override = model.world.core, ConfigOverride(policy=policy)
    request = SelectRequest(token_ids=token_ids, router_config_override=override, **wanted)
    dice = Random()
    dice.setstate(core._placer._rng.getstate())
    placement = place(model.world, request, 1.0, is_hashed=is_hashed)
    table, costs = placement.choice.table, placement.choice.costs.tolist()

    assert list(table.ranks) == [rank(each) for each in expected]
    rows = [model.terms(each, request, 1.0, guesses=has_guesses) for each in expected]
    np.testing.assert_array_equal(table.values, rows)
    if policy != "dynamo-1.0" or request.phase != "decode":  # which weighs decode by itself
        wanted_costs = costs_of(policy, rows, len(token_ids), request.expected_output_tokens, 1.0)
        assert costs == (wanted_costs if policy == "predictive" else pytest.approx(wanted_costs))
    ties = [i for i, cost in enumerate(costs) if cost == min(costs)]
    if policy == "dynamo-1.0":
        sizes = [rows[i][columns.HELD_BLOCKS] for i in ties]
        ties = [i for i, size in zip(ties, sizes, strict=True) if size == min(sizes)]
    drawn = ties[dice.randrange(len(ties))] if len(ties) > 1 else ties[0]
    assert placement.rank == rank(expected[drawn])
    assert core._placer._rng.getstate() == dice.getstate()

    identity = placement.worker.identity
    for worker_id in (each for each in model.identities if model.identities[each] == identity):
        hashes = model.hashes(worker_id, token_ids)
        held = Overlap(*model.overlap(worker_id, hashes, has_guesses))
        assert placement.overlaps.get(rank(worker_id), Overlap(0, 0, 0, 0)) == held
    core.tracker.check_invariants()


@given(steps, prompts)
@hypothesis_settings(max_examples=examples(20), deadline=None)
def test_shards_are_searched_as_one_tree(taken, token_ids):
    placements = []
    for make_indexer in (RadixTree, lambda: ConcurrentIndex(RadixTree, 2)):
        model = Model(IDENTITIES[:1] * 4, make_indexer=make_indexer, default_policy="predictive")
        for number, (step, index, prompt) in enumerate(taken):
            if step == "book":
                model.book(number, WORKERS[index], prompt)
            else:
                model.cache(WORKERS[index], step, prompt)
        placements.append(place(model.world, SelectRequest(token_ids=token_ids), 1.0))
        for worker_id in WORKERS:
            model.world.core.handle(RemoveWorker(worker_id, "the end"), 1.0)
    one, other = placements
    assert one.rank == other.rank
    assert np.array_equal(one.choice.table.values, other.choice.table.values)
    assert dict(one.overlaps.items()) == dict(other.overlaps.items())


def test_preferred_taints_multiply_costs_of_default_policy():
    world = World(default_policy="predictive")
    for worker_id in (1, 2):
        world.worker(worker_id, labels=WorkerLabels(taints=["a"] if worker_id == 2 else []))
    plain = place(world, SelectRequest(token_ids=PROMPT), 1.0).choice.costs
    constraints = RoutingConstraints(preferred_taints={"a": 1.0})
    request = SelectRequest(token_ids=PROMPT, routing_constraints=constraints)
    factor = math.exp(-math.tanh(1.0))
    assert place(world, request, 1.0).choice.costs == pytest.approx(plain * [1.0, factor])


def test_decision_names_ranks_of_a_worker_and_the_source_of_more_blocks():
    world = World(default_policy="predictive")
    addresses = {0: ["tcp://h:1"], 1: ["tcp://h:2"]}
    for worker_id in (1, 2, 3):
        world.worker(worker_id, data_parallel_size=2, block_addresses=addresses)
    world.cache(rank(1), PROMPT)
    target = RankTarget(1, 0)
    for number in range(12):
        world.book(f"r{number}", range(1000 * number, 1000 * number + 999), pinned_worker=target)
    request = SelectRequest(token_ids=PROMPT, request_id="mine")
    decision = explain(world.core, request, place(world, request, 1.0), 1.0)
    assert (decision.worker_id == 1, len(decision.overlap.dp)) == (False, 2)
    assert decision.source == BlockSource(1, 0, len(PROMPT) // BLOCK_SIZE, "device")


def test_workers_that_come_and_go_are_seen():
    world = World(default_policy="predictive")
    for worker_id in (1, 2, 3):
        world.worker(worker_id)
    request = SelectRequest(token_ids=PROMPT)
    assert len(place(world, request, 1.0).choice.table) == 3
    world.worker(4)
    world.cache(rank(4), PROMPT)
    assert place(world, request, 1.0).rank == rank(4)
    assert place(world, request, 1.0).choice.table.values[3, OVERLAP_REMOTE] == 10
    world.core.handle(RemoveWorker(4, "gone"), 1.0)
    assert len(place(world, request, 1.0).choice.table) == 3
