"""The short cut comes to what the general way comes to, or is not taken."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import BLOCK_SIZE, IDENTITY, World, rank
from router.explain import explain, explain_plain
from router.indexer.approximate import ApproximateLimits
from router.indexer.base import IndexMode
from router.indexer.none import NoneIndex
from router.plain import plain_request
from router.protocol.replies import BlockSource
from router.protocol.requests import ConfigOverride, RankTarget, RoutingConstraints, SelectRequest
from router.protocol.values import SCHEME, Identity
from router.scheduler.busy import BusyThresholds
from router.scheduler.gate import GateSettings
from router.scheduler.settings import PolicySettings
from router.sequence.hashing import token_array
from router.sequence.prompt import prepare
from router.sequence.tracking import Tracking

PROMPT = list(range(40))
TARGET = RankTarget(1, 0)
WORKERS = (1, 2, 3)


def world_of(identity=IDENTITY, **fields):
    world = World(**{"default_policy": "predictive", **fields})
    for worker_id in WORKERS:
        world.worker(worker_id, identity=identity)
    return world


def short(world, request, now_s=1.0):
    """The placement by the short cut; None where it is not taken."""
    placer = world.core._placer
    prompt = prepare(request, (), naming=world.core.naming)
    candidates = placer.schedulable(request.scope)
    return placer.short_cut.place(request, request.scope, prompt, candidates, now_s)


def general(world, request, now_s=1.0):
    """The same by the general way, which prompts take whose hashes are known."""
    identities = world.core.identities(request.scope)
    prompt = prepare(request, identities, naming=world.core.naming)
    return world.core.select(request, prompt, now_s)


def both(world, request, now_s=1.0):
    """Both, from the same random state."""
    rng = world.core._placer._rng
    state = rng.getstate()
    by_short_cut = short(world, request, now_s)
    drawn = rng.getstate()
    rng.setstate(state)
    by_general_way = general(world, request, now_s)
    assert rng.getstate() == drawn
    assert_plain_same(world, request, by_general_way, state, now_s)
    return by_short_cut, by_general_way


def assert_plain_same(world, request, other, state, now_s=1.0):
    """What a plain request is told is what is told of a placement by the general way."""
    rng, plain = world.core._placer._rng, plain_request(request)
    drawn = rng.getstate()
    rng.setstate(state)
    tokens = token_array(request.token_ids)
    placement = world.core.select_plain(plain, tokens, now_s)
    assert rng.getstate() == drawn
    told = explain_plain(world.core, plain.request_id, placement, now_s)
    assert told == explain(world.core, request, other, now_s)


def assert_same(one, other):
    assert one.choice.index == other.choice.index
    assert one.choice.policy == other.choice.policy
    assert np.array_equal(one.choice.costs, other.choice.costs)
    for field in ("scope", "ranks", "isl_tokens", "expected_output_tokens", "now_s", "claims"):
        assert getattr(one.choice.table, field) == getattr(other.choice.table, field)
    assert np.array_equal(one.choice.table.values, other.choice.table.values, equal_nan=True)
    assert (one.worker, one.settings) == (other.worker, other.settings)
    assert dict(one.overlaps.items()) == dict(other.overlaps.items())
    assert one.passed.candidates is other.passed.candidates
    assert (one.passed.factors, one.passed.removed) == (None, other.passed.removed)
    for field in ("sequence_hashes", "load_hashes", "public_hashes"):
        assert np.array_equal(getattr(one.prompt, field), getattr(other.prompt, field))
    assert one.prompt.isl_tokens == other.prompt.isl_tokens
    assert one.prompt.block_size == other.prompt.block_size


prompts = st.builds(
    lambda known, more: PROMPT[:known] + [100 + each for each in range(more)],
    st.integers(0, 40),
    st.integers(0, 30),
).filter(len)
steps = st.lists(
    st.tuples(st.sampled_from(["cache", "book", "grow"]), st.sampled_from(WORKERS), prompts),
    max_size=8,
)


@given(
    steps,
    prompts,
    st.sampled_from([{}, {"lora_name": None, "cache_salt": "s"}, {"expected_output_tokens": 50}]),
    st.booleans(),
)
def test_it_comes_to_what_the_general_way_comes_to(taken, token_ids, fields, eagle):
    world = world_of(Identity(SCHEME, 4, eagle))
    for number, (step, worker_id, prompt) in enumerate(taken):
        if step == "cache":
            world.cache(rank(worker_id), prompt)
        else:
            world.book(f"r{number}", prompt, allowed_worker_ids=[worker_id])
        if step == "grow":
            world.core.prefill_complete(f"r{number}", 0.5)
    one, other = both(world, SelectRequest(token_ids=token_ids, **fields))
    assert_same(one, other)


@given(steps, prompts)
def test_guesses_alone_are_searched_alike(taken, token_ids):
    limits = ApproximateLimits(10.0, 1000, 0.8)
    world = world_of(
        make_indexer=lambda: NoneIndex(refuses_dumps=False),
        mode=IndexMode.APPROXIMATE,
        prediction=limits,
    )
    for number, (_, worker_id, prompt) in enumerate(taken):
        world.book(f"r{number}", prompt, allowed_worker_ids=[worker_id])
    request = SelectRequest(token_ids=token_ids)
    if taken:
        assert_same(*both(world, request))
    else:
        assert short(world, request) is None


def test_plain_requests_are_told_of_every_rank_of_a_worker_and_of_who_has_more():
    world = World(default_policy="predictive")
    addresses = {0: ["tcp://h:1"], 1: ["tcp://h:2"]}
    for worker_id in WORKERS:
        world.worker(worker_id, data_parallel_size=2, block_addresses=addresses)
    world.cache(rank(1), PROMPT)
    for number in range(12):
        world.book(f"r{number}", range(1000 * number, 1000 * number + 999), pinned_worker=TARGET)
    request = SelectRequest(token_ids=PROMPT, request_id="mine")
    _, placement = both(world, request)
    decision = explain(world.core, request, placement, 1.0)
    assert (decision.worker_id == 1, len(decision.overlap.dp)) == (False, 2)
    assert decision.source == BlockSource(1, 0, len(PROMPT) // BLOCK_SIZE, "device")


def test_equal_costs_are_drawn_alike():
    world = world_of()
    request = SelectRequest(token_ids=PROMPT)
    chosen = set()
    for _ in range(40):
        one, other = both(world, request)
        assert_same(one, other)
        chosen.add(one.rank)
    assert chosen == {rank(each) for each in WORKERS}


def test_whoever_comes_or_goes_is_seen():
    world = world_of()
    request = SelectRequest(token_ids=PROMPT)
    assert len(short(world, request).choice.table) == 3
    world.worker(4)
    world.cache(rank(4), PROMPT)
    assert_same(*both(world, request))
    assert short(world, request).rank == rank(4)
    world.core.remove_worker(4, "gone")
    assert_same(*both(world, request))
    assert len(short(world, request).choice.table) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_worker_ids": [1]},
        {"excluded_worker_ids": [1]},
        {"phase": "aggregated"},
        {"pinned_worker": RankTarget(1)},
        {"affinity_target": RankTarget(1)},
        {"routing_constraints": RoutingConstraints()},
        {"lora_name": "a"},
        {"prefill_worker_id": 1},
        {"router_config_override": ConfigOverride(router_temperature=1.0)},
        {"block_mm_infos": [None]},
        {"routing_group": "other"},
    ],
)
def test_requests_that_ask_for_more_do_not_take_it(fields):
    assert short(world_of(), SelectRequest(token_ids=PROMPT, **fields)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": "a"},
        {"phase": "aggregated"},
        {"selection_id": "s"},
        {"session_id": "s"},
        {"explain": True},
        {"advisory": True},
        {"tenant": "t"},
        {"kv_hint": 1},
        {"sequence_hashes": [1], "isl_tokens": 4},
    ],
)
def test_requests_that_ask_for_more_are_not_plain(fields):
    assert plain_request(SelectRequest(token_ids=[], **fields)) is None


def test_prompts_without_tokens_do_not_take_it():
    assert short(world_of(), SelectRequest(sequence_hashes=[1], isl_tokens=4)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"default_policy": "dynamo-1.0"},
        {"group_policies": {"default": "random"}},
        {"policy": PolicySettings(router_temperature=1.0)},
        {"tracking": Tracking(kv_reuse=False)},
        {"prediction": ApproximateLimits(10.0, 100, 0.8)},
        {"models_prefill": True},
        {"gate": GateSettings(BusyThresholds(active_prefill_tokens_threshold=1))},
    ],
)
def test_settings_that_ask_for_more_do_not_take_it(fields):
    assert short(world_of(**fields), SelectRequest(token_ids=PROMPT)) is None


def test_a_fleet_of_two_identities_does_not_take_it():
    world = world_of()
    world.worker(4, identity=Identity(SCHEME, 8))
    assert short(world, SelectRequest(token_ids=PROMPT)) is None


def test_requests_that_grow_untold_close_it():
    world = world_of()
    world.book("r", PROMPT)
    world.core.prefill_complete("r", 0.5, in_batch=True)
    assert short(world, SelectRequest(token_ids=PROMPT)) is None
