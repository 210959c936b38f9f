"""Placements: of trees that are split, their explanation, and fleets that change."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from router.core.commands import RemoveWorker, Select
from router.core.views.decisions import explain
from router.indexer.concurrent import ConcurrentIndex
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.catalogue import WorkerLabels
from router.protocol.replies import BlockSource
from router.protocol.requests import RankTarget, RoutingConstraints, SelectRequest
from router.protocol.values import SCHEME, Identity, Tier
from router.scheduler.terms import (
    OVERLAP_REMOTE,
)
from router.sequence.active.prompt import prepare
from support.chaos.fuzzing import examples
from support.values.builders import BLOCK_SIZE, World, rank

PROMPT = list(range(40))
WORKERS = (1, 2, 3, 4)
IDENTITIES = (Identity(SCHEME, 4), Identity(SCHEME, 8), Identity(SCHEME, 4, eagle=True))
POLICIES = ("predictive", "dynamo-1.0", "least-loaded", "lmetric")


def place(world, request, now_s):
    return world.core.handle(Select(request, prepare(request, ())), now_s)[0]


prompts = st.builds(
    lambda known, more: PROMPT[:known] + [100 + each for each in range(more)],
    st.integers(0, 40),
    st.integers(0, 30),
).filter(len)
steps = st.lists(
    st.tuples(st.sampled_from([*Tier, "book"]), st.sampled_from(WORKERS), prompts), max_size=8
)


@given(steps, prompts)
@hypothesis_settings(max_examples=examples(20), deadline=None)
def test_shards_are_searched_as_one_tree(taken, token_ids):
    placements = []
    for make_indexer in (RadixTree, lambda: ConcurrentIndex(RadixTree, 2)):
        world = World(make_indexer=make_indexer, default_policy="predictive")
        for worker_id in WORKERS:
            world.worker(worker_id)
        for number, (step, worker_id, prompt) in enumerate(taken):
            if step == "book":
                world.book(f"r{number}", prompt, allowed_worker_ids=[worker_id])
            else:
                world.cache(rank(worker_id), prompt, tier=step)
        placements.append(place(world, SelectRequest(token_ids=token_ids), 1.0))
        for worker_id in WORKERS:
            world.core.handle(RemoveWorker(worker_id, "the end"), 1.0)
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
