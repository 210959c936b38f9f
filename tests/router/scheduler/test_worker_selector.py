"""Dynamo's selection contract, rule by rule."""

from collections import Counter
from random import Random

import pytest

from router.errors import InvalidFieldError
from router.protocol.requests import ConfigOverride
from router.protocol.values import Rank
from router.scheduler.errors import NoEndpointsError, WorkersOverloadedError
from router.scheduler.policy.dynamo import Dynamo10
from router.scheduler.policy.registry import builtin_policies
from router.scheduler.settings import PolicySettings
from router.scheduler.worker_selector import SchedulingRequest, WorkerConfig, WorkerSelector

A, B = Rank(1, 0), Rank(2, 0)
TWO = {2: WorkerConfig(), 1: WorkerConfig()}


def select(workers=TWO, block_size=16, policy=None, settings=None, **request):
    selector = WorkerSelector(policy or Dynamo10(), settings or PolicySettings(), Random(1))
    request = SchedulingRequest(**{"isl_tokens": 160, **request})
    return selector.select_worker(workers, request, block_size)


def drawn(draws=2000, **arguments):
    """How often each rank is chosen by selectors of all seeds."""
    settings = arguments.pop("settings", PolicySettings())
    request = SchedulingRequest(**{"isl_tokens": 160, **arguments})
    selector = WorkerSelector(Dynamo10(), settings, Random(1))
    return Counter(selector.select_worker(TWO, request, 16).worker for _ in range(draws))


@pytest.mark.parametrize(
    ("isl_tokens", "block_size", "required"), [(160, 16, 10), (161, 16, 11), (1, 16, 1), (7, 1, 7)]
)
def test_required_blocks_are_those_of_the_request_rounded_up(isl_tokens, block_size, required):
    assert select(isl_tokens=isl_tokens, block_size=block_size).required_blocks == required


def test_the_overlap_is_the_chosen_ranks():
    chosen = select(overlaps={B: 4}, prefill_tokens={A: 160, B: 96}, decode_blocks={A: 10, B: 10})
    assert (chosen.worker, chosen.overlap_blocks) == (B, 4)
    busy = select(overlaps={B: 4}, prefill_tokens={A: 160, B: 96}, decode_blocks={A: 10, B: 90})
    assert (busy.worker, busy.overlap_blocks) == (A, 0)


def test_prefill_tokens_are_taken_as_they_are():
    """Potential prefill is the caller's number: 96 against 97 tokens, whatever the overlap."""
    decode = {A: 10, B: 10}
    chosen = select(overlaps={A: 9}, prefill_tokens={A: 97, B: 96}, decode_blocks=decode)
    assert chosen.worker == B


def test_prefill_tokens_of_a_rank_that_is_missing_are_the_requests():
    decode = {A: 10, B: 10}
    assert select(overlaps={A: 9}, prefill_tokens={B: 159}, decode_blocks=decode).worker == B
    assert select(overlaps={A: 9}, prefill_tokens={B: 161}, decode_blocks=decode).worker == A


def test_decode_blocks_of_a_rank_that_is_missing_are_its_prefill_blocks_rounded_down():
    """A: 168 tokens are 10.5 blocks, and 10 of decode: 20.5."""
    tokens = {A: 168, B: 160}
    assert select(isl_tokens=168, prefill_tokens=tokens, decode_blocks={B: 10}).worker == B
    assert select(isl_tokens=168, prefill_tokens=tokens, decode_blocks={B: 11}).worker == A


def test_the_cost_is_prefill_by_weight_and_decode():
    request = {"prefill_tokens": {A: 160, B: 80}, "decode_blocks": {A: 10, B: 18}}
    assert select(**request).worker == A  # 10 + 10 against 5 + 18
    assert select(**request, settings=PolicySettings(prefill_load_scale=2.0)).worker == B
    override = ConfigOverride(overlap_score_weight=2.0)
    assert select(**request, router_config_override=override).worker == B


def test_workers_are_expanded_over_their_data_parallel_ranks():
    workers = {7: WorkerConfig(data_parallel_start_rank=2, data_parallel_size=3)}
    seen = {
        select(workers, decode_blocks={Rank(7, rank): rank != best for rank in range(5)}).worker
        for best in range(5)
    }
    assert seen == {Rank(7, 2), Rank(7, 3), Rank(7, 4)}


def test_the_order_of_workers_is_of_no_matter():
    decode = {A: 10, B: 11}
    assert select(dict(sorted(TWO.items())), decode_blocks=decode).worker == A
    assert select(TWO, decode_blocks=decode).worker == A


def test_equal_costs_go_to_the_smallest_tree():
    assert drawn(tree_sizes={A: 9, B: 8}) == {B: 2000}
    assert drawn(tree_sizes={A: 9}) == {B: 2000}


def test_equal_costs_and_equal_trees_are_drawn_from():
    counts = drawn(tree_sizes={A: 8, B: 8})
    assert abs(counts[A] - 1000) < 120


def test_by_temperature_the_dearer_one_is_chosen_at_times():
    request = {"decode_blocks": {A: 10, B: 12}}
    counts = drawn(**request, settings=PolicySettings(router_temperature=1.0), draws=4000)
    assert counts[B] / 4000 == pytest.approx(0.269, abs=0.03)  # exp(-1) / (1 + exp(-1))
    cold = ConfigOverride(router_temperature=0.0)
    warm = PolicySettings(router_temperature=1.0)
    assert drawn(**request, settings=warm, router_config_override=cold) == {A: 2000}


def test_only_allowed_workers_are_chosen():
    assert select(allowed_worker_ids=[2, 99]).worker == B
    assert select(allowed_worker_ids={1}, decode_blocks={A: 99, B: 0}).worker == A


@pytest.mark.parametrize(
    ("workers", "request_fields"),
    [
        ({}, {}),
        (TWO, {"allowed_worker_ids": []}),
        (TWO, {"allowed_worker_ids": [99]}),
        ({1: WorkerConfig(data_parallel_size=0)}, {}),
        (TWO, {"pinned_worker": Rank(3, 0)}),
        (TWO, {"pinned_worker": Rank(2, 1)}),
        (TWO, {"pinned_worker": B, "allowed_worker_ids": [1]}),
    ],
)
def test_no_eligible_worker_raises_no_endpoints(workers, request_fields):
    with pytest.raises(NoEndpointsError):
        select(workers, **request_fields)


def test_a_pinned_rank_is_chosen_whatever_it_costs():
    workers = {1: WorkerConfig(data_parallel_size=2), 2: WorkerConfig()}
    pinned = Rank(1, 1)
    assert select(workers, pinned_worker=pinned, decode_blocks={pinned: 999}).worker == pinned


def test_overloaded_workers_are_passed_over():
    assert select(overloaded_worker_ids=[1], decode_blocks={A: 0, B: 99}).worker == B


def test_all_overloaded_is_an_error_of_its_own():
    with pytest.raises(WorkersOverloadedError) as refused:
        select(overloaded_worker_ids=[1, 2])
    assert (refused.value.worker_id, refused.value.http_status) == (None, 529)
    with pytest.raises(WorkersOverloadedError):
        select(allowed_worker_ids=[1], overloaded_worker_ids=[1])


def test_an_overloaded_pin_names_its_worker():
    with pytest.raises(WorkersOverloadedError, match="worker 2, where the request is pinned to"):
        select(pinned_worker=B, overloaded_worker_ids=[2])


def test_no_endpoints_takes_precedence_over_overload():
    with pytest.raises(NoEndpointsError):
        select(allowed_worker_ids=[99], overloaded_worker_ids=[1, 2])


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("isl_tokens", {"isl_tokens": 0}), ("block_size", {"block_size": 0})],
)
def test_without_tokens_there_is_nothing_to_place(field, arguments):
    with pytest.raises(InvalidFieldError, match=f"{field}: 0"):
        select(**arguments)


@pytest.mark.parametrize("policy", builtin_policies(), ids=lambda policy: policy.name)
def test_every_policy_keeps_the_contract(policy):
    chosen = select(policy=policy, overlaps={A: 2, B: 2}, decode_blocks={A: 10, B: 10})
    assert chosen.worker in (A, B)
    assert (chosen.required_blocks, chosen.overlap_blocks) == (10, 2)
    assert select(policy=policy, pinned_worker=A).worker == A
