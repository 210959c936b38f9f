"""Rules of the anchor that no other test states; and that each rule has a test.

`router/scheduler/ANCHOR.md` is the list: Dynamo's rule, what we do, and the tests that hold us to
it.
"""

import re
from pathlib import Path

import pytest

from router import errors
from router.api import errors as api_errors
from router.api.request_headers import with_header_fields
from router.config.router import RouterConfig
from router.core.commands import OutputBlock, RemoveWorker, Select
from router.protocol.requests import SelectRequest
from router.protocol.values import SCHEME, Identity, Tier
from router.runtime.process.settings import settings_of
from router.scheduler import errors as placement_errors
from router.scheduler.queue import errors as queue_errors
from router.sequence.active import errors as booking_errors
from router.sequence.active.prompt import prepare
from support.values.builders import World, rank

ROOT = Path(__file__).parents[3]
LIST = (ROOT / "router/scheduler/ANCHOR.md").read_text()
PROMPT = list(range(40))


RULES = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in LIST.splitlines()
    if line.startswith("| ") and not line.startswith("| rule of the anchor")
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0][:60])
def test_every_rule_has_tests_and_they_exist(rule):
    _, _, tests = rule
    named = re.findall(r"`((?:\w+/)*test_\w+)::(\w+)`", tests)
    assert named
    for file, test in named:
        source = (ROOT / "tests/router" / f"{file}.py").read_text()
        assert re.search(rf"def {test}\(", source), (file, test)


# ── 3.1 The index ────────────────────────────────────────────────────────────────────────────────


def choose(world, **fields):
    request = SelectRequest(token_ids=PROMPT, **fields)
    return world.core.handle(Select(request, prepare(request, ())), 0.0)[0]


def overlaps(world):
    table = choose(world).choice.table
    return {each: table.terms(i).overlap_blocks for i, each in enumerate(table.ranks)}


def test_a_rank_that_holds_a_prefix_alone_is_followed_to_its_end():
    """With `early_exit` 1.0.2 stops where one worker is left; 1.6.1 and we do not."""
    world = World()
    for worker_id in (1, 2):
        world.worker(worker_id)
    world.cache(rank(1), PROMPT)
    world.cache(rank(2), PROMPT[:4])
    assert overlaps(world) == {rank(1): 10, rank(2): 1}


def test_a_clear_is_of_one_rank_which_stays_known():
    """As 1.6.1; in 1.0.2 it clears all ranks of the worker."""
    world = World()
    world.worker(1, data_parallel_size=2)
    for dp_rank in (0, 1):
        world.cache(rank(1, dp_rank), PROMPT)
    world.journals[rank(1)].cleared()
    world.deliver(rank(1))
    assert overlaps(world) == {rank(1, 0): 0, rank(1, 1): 10}


def test_a_removed_worker_is_known_no_more():
    world = World()
    for worker_id in (1, 2):
        world.worker(worker_id)
        world.cache(rank(worker_id), PROMPT)
    world.core.handle(RemoveWorker(1, "test"), 0.0)
    assert overlaps(world) == {rank(2): 10}
    assert {blocks.rank for _, blocks in world.core.dump()} == {rank(2)}


def test_removal_continues_after_an_unknown_block():
    """1.0.2 answers the first error, and goes on; its nested map does not go on."""
    world = World()
    world.worker(1)
    world.cache(rank(1), PROMPT)
    request = SelectRequest(token_ids=PROMPT)
    names = prepare(request, ()).hashed(Identity(SCHEME, 4)).sequence_hashes.tolist()
    world.journals[rank(1)].removed(Tier.DEVICE, [123, *names[8:]])
    world.deliver(rank(1))
    assert overlaps(world) == {rank(1): 8}


# ── 4.1 Cost ─────────────────────────────────────────────────────────────────────────────────────


def test_ranks_begin_where_their_worker_says():
    world = World()
    world.worker(1, data_parallel_start_rank=4, data_parallel_size=2)
    assert list(overlaps(world)) == [rank(1, 4), rank(1, 5)]


# ── 4.3 The queue ────────────────────────────────────────────────────────────────────────────────


def test_a_gateway_names_the_policy_class_in_a_header():
    headers = {"x-dynamo-meta-policy-class": "batch"}
    assert with_header_fields(SelectRequest(token_ids=[1]), headers).policy_class == "batch"


# ── 5 Active sequences ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("blocks", "fraction", "counted"), [(1, 0.5, 1), (3, 0.5, 2), (2, 0.2, 0), (2, 0.3, 1)]
)
def test_active_blocks_are_rounded_and_halves_up(blocks, fraction, counted):
    world = World()
    world.worker(1)
    world.book("x", PROMPT[: 4 * (blocks - 1)])
    world.core.handle(OutputBlock("x", fraction), 0.0)
    assert world.core.tracker.active(rank(1)).active_blocks == counted


def test_more_overlap_than_prompt_leaves_nothing_to_compute():
    world = World()
    world.worker(1)
    world.cache(rank(1), PROMPT)
    world.book("x", PROMPT)
    assert world.core.tracker.active(rank(1)).active_prefill_tokens == 0


def test_blocks_of_one_token_are_blocks():
    """1.0.2 refuses them."""
    world = World()
    world.worker(1, identity=Identity(SCHEME, 1))
    world.book("x", PROMPT)
    assert world.core.tracker.active(rank(1)).active_blocks == 40


def test_duplicate_booking_names_its_rank():
    world = World()
    world.worker(7, data_parallel_start_rank=2)
    world.book("x", PROMPT)
    with pytest.raises(booking_errors.DuplicateReservationError) as caught:
        world.book("x", PROMPT)
    error = caught.value
    assert (error.request_id, error.worker_id, error.dp_rank) == ("x", 7, 2)


def test_an_output_block_implies_nothing_of_the_prompt():
    world = World()
    world.worker(1)
    world.book("x", PROMPT)
    world.core.handle(OutputBlock("x", None), 0.0)
    assert world.core.tracker.active(rank(1)).active_prefill_tokens == 40


# ── Errors and settings ──────────────────────────────────────────────────────────────────────────

ERRORS = {
    "NoEndpoints": (placement_errors.NoEndpointsError, 503),
    "AllWorkersBusy, AllEligibleWorkersOverloaded": (placement_errors.WorkersOverloadedError, 529),
    "RouterQueueLimitExceeded": (queue_errors.QueueFullError, 529),
    "SubscriberShutdown": (api_errors.DrainingError, 503),
    "WorkerNotFound": (errors.WorkerNotFoundError, 404),
    "DuplicateRequest": (booking_errors.DuplicateReservationError, 409),
    "RequestNotFound": (booking_errors.ReservationNotFoundError, 404),
    "PolicyError": (placement_errors.PolicyFailedError, 500),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_of_the_anchor_is_one_of_ours_with_a_code_to_count_by(name):
    error, status = ERRORS[name]
    assert error.http_status == status
    modules = errors, api_errors, booking_errors, placement_errors, queue_errors
    every = [each for module in modules for each in vars(module).values()]
    kinds = {each for each in every if isinstance(each, type) and hasattr(each, "http_status")}
    assert [each for each in kinds if each.code == error.code] == [error]


DEFAULTS = {
    "overlap_score_weight": 1.0,
    "router_temperature": 0.0,
    "use_kv_events": True,
    "router_track_active_blocks": True,
    "router_track_prefill_tokens": True,
    "router_assume_kv_reuse": True,
    "router_prefill_load_model": "none",
    "approximate_ttl_s": 120.0,
    "approximate_max_blocks": 1_048_576,
    "approximate_prune_target": 0.8,
    "router_queue_threshold": None,
    "router_queue_policy": "fcfs",
    "router_policy_config": "",
    "overlap_score_credit": 1.0,
    "overlap_score_credit_decay": 0.0,
    "prefill_load_scale": None,
    "decode_active_request_weight": 0.0,
    "host_cache_hit_weight": 0.75,
    "disk_cache_hit_weight": 0.25,
    "predicted_ttl_s": 0.0,
    "reservation_ttl_s": 300.0,
    "active_decode_blocks_threshold": None,
    "active_prefill_tokens_threshold": None,
    "active_prefill_tokens_threshold_frac": None,
}
"""Of `KvRouterConfig`; where ours differ on purpose, the list says so."""


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_anchors(name):
    ours = {each.name: each.value for each in settings_of(RouterConfig())}
    assert ours[name] == DEFAULTS[name]
