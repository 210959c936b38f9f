"""Eligible and busy ranks, and the counted parts of bookings: in a whole core."""

from math import exp, isnan, tanh

import pytest

from router.api.workers import BusyCommands, BusyRank
from router.core.commands import (
    ApplyLoad,
    Free,
    OrderWorker,
    OutputBlock,
    PrefillComplete,
    RemoveWorker,
    SetBusyThresholds,
    SetProblem,
    Tick,
)
from router.errors import WorkerNotFoundError
from router.protocol.catalogue import WorkerLabels
from router.protocol.loads import LoadGauges
from router.protocol.replies import RemovedRanks
from router.protocol.requests import (
    BusyThresholdRequest,
    ConfigOverride,
    RankTarget,
    RoutingConstraints,
)
from router.protocol.values import Scope
from router.scheduler.busy import BusyThresholds
from router.scheduler.eligibility import EligibilitySettings
from router.scheduler.errors import NoEndpointsError, WorkersOverloadedError
from router.sequence.active.footprint import TrackedParts
from router.sequence.rank_table import DECODE_BLOCKS, DECODE_SIDE
from support.values.builders import BLOCK_SIZE, World, rank, report

PROMPT = list(range(10 * BLOCK_SIZE))
LATE = 10.0


def world_of(*labels, **fields):
    world = World(**fields)
    for worker_id, each in enumerate(labels, start=1):
        world.worker(worker_id, labels=WorkerLabels(**each))
    return world


def refused(world, **fields):
    with pytest.raises(NoEndpointsError) as caught:
        world.select(PROMPT, **fields)
    return caught.value


# ── Filters ──────────────────────────────────────────────────────────────────────────────────────


def test_impossible_request_names_the_filter_and_the_removed_ranks():
    world = world_of({"taints": ["a"]}, {"taints": ["b"]}, {})
    error = refused(
        world,
        allowed_worker_ids=[1, 2],
        routing_constraints=RoutingConstraints(["b"]),
        pinned_worker=RankTarget(1, 0),
    )
    assert error.reason == "no worker is left by required_taints"
    assert error.body()["removed"] == [
        RemovedRanks("allowed_worker_ids", 1, ["3.0"]),
        RemovedRanks("pinned_worker", 1, ["2.0"]),
        RemovedRanks("required_taints", 1, ["1.0"]),
    ]
    assert "pinned_worker removed 2.0" in str(error)


def test_an_error_names_a_few_and_counts_all():
    world = World()
    world.worker(1, data_parallel_size=64)
    (removed,) = refused(world, allowed_worker_ids=[2]).removed
    assert (removed.count, len(removed.ranks)) == (64, 16)
    assert str(removed).endswith("1.15 and 48 more")


def test_unschedulable_workers_have_reasons():
    world = world_of({}, {}, {})
    world.worker(4, model_name="another")
    world.core.handle(OrderWorker(1, "cordoned"), 0.0)
    world.core.handle(OrderWorker(2, "cordoned"), 0.0)
    world.core.handle(SetProblem(3, "its engine is gone"), 0.0)
    assert refused(world).removed == [
        RemovedRanks("not schedulable (cordoned)", 2, ["1.0", "2.0"]),
        RemovedRanks("not schedulable (its engine is gone)", 1, ["3.0"]),
    ]


def test_filters_follow_announced_labels():
    world = world_of({}, {"taints": ["a"]})
    wanted = {"routing_constraints": RoutingConstraints(["a"])}
    assert world.select(PROMPT, **wanted).rank == rank(2)
    world.worker(1, labels=WorkerLabels(taints=["a"]))
    world.worker(2, labels=WorkerLabels())
    assert world.select(PROMPT, **wanted).rank == rank(1)


def test_more_selections_than_are_remembered_are_right_all_the_same():
    world = World()
    for worker_id in range(1, 10):
        world.worker(worker_id)
    for bits in [*range(1, 100), *range(1, 100)]:
        allowed = [worker_id for worker_id in range(1, 10) if bits >> worker_id - 1 & 1]
        ranks = world.select([1], allowed_worker_ids=allowed).choice.table.ranks
        assert [each.worker_id for each in ranks] == allowed


def test_a_preference_is_worth_a_factor_and_no_more():
    world = world_of({}, {"taints": ["near"]})
    world.book("x", PROMPT, allowed_worker_ids=[2])
    world.core.handle(PrefillComplete("x"), 0.0)
    other = list(range(1000, 1040))
    assert world.select(other).rank == rank(1)
    prefers = {"routing_constraints": RoutingConstraints(preferred_taints={"near": 1.0})}
    placement = world.select(other, **prefers)
    assert placement.rank == rank(2)
    assert placement.choice.costs.tolist() == pytest.approx([20.0, 30.0 * exp(-tanh(1.0))])
    world.book("y", list(range(2000, 2080)), allowed_worker_ids=[2])
    assert world.select(other, **prefers).rank == rank(1)


def test_decode_worker_is_near_the_prefill_worker():
    here, there = {"topology_domains": {"zone": "a"}}, {"topology_domains": {"zone": "b"}}
    world = world_of({**here, "kv_transfer_domain": "zone"}, there, here)
    placement = world.select(PROMPT, prefill_worker_id=1, allowed_worker_ids=[2, 3])
    assert placement.rank == rank(3)
    assert refused(world, prefill_worker_id=1, allowed_worker_ids=[2]).removed[-1].ranks == ["2.0"]
    with pytest.raises(WorkerNotFoundError, match="prefill_worker_id"):
        world.select(PROMPT, prefill_worker_id=99)


def test_requests_for_an_adapter_gather_where_it_is_loaded_but_not_at_any_cost():
    world = world_of(
        {}, {"max_gpu_lora_count": 2}, gate=EligibilitySettings(lora_affinity_weight=1.0)
    )
    world.book("x", PROMPT, lora_name="sql", pinned_worker=RankTarget(2))
    asked = {"lora_name": "sql"}
    other = list(range(500, 540))
    world.book("y", other, lora_name="poetry", pinned_worker=RankTarget(2))
    for request_id in "xy":
        world.core.handle(Free(request_id), 0.0)
    assert [world.select(other, **asked).rank for _ in range(4)] == [rank(2)] * 4
    world.book("z", list(range(2000, 2400)), pinned_worker=RankTarget(2))
    assert world.select(other, **asked).rank == rank(1)
    world.core.handle(Free("z"), 0.0)
    world.core.handle(RemoveWorker(2, "test"), 0.0)
    world.worker(2)
    assert len({world.select(other, **asked).rank for _ in range(20)}) == 2


@pytest.mark.parametrize("is_hard", [True, False])
def test_a_session_stays_unless_its_rank_is_gone(is_hard):
    world = world_of({}, {}, gate=EligibilitySettings(is_affinity_hard=is_hard))
    world.book("x", PROMPT, allowed_worker_ids=[2])
    bound = {"affinity_target": RankTarget(2, 0)}
    assert world.select(list(range(500, 600)), **bound).rank == rank(2)
    assert world.core.may_choose(Scope(), rank(2))
    world.core.handle(OrderWorker(2, "draining"), 0.0)
    assert not world.core.may_choose(Scope(), rank(2))
    assert world.select(PROMPT, **bound).rank == rank(1)


def test_a_session_that_is_a_hint_decides_between_ranks_that_cost_nearly_the_same():
    world = world_of({}, {})
    hint = {"affinity_target": RankTarget(2, 0), "session_is_hint": True}
    other = list(range(500, 540))
    placement = world.select(other, **hint)
    assert placement.rank == rank(2)
    assert placement.choice.costs.tolist() == pytest.approx([20.0, 19.0])
    world.book("x", PROMPT, pinned_worker=RankTarget(2))
    assert world.select(other, **hint).rank == rank(1)
    world.core.handle(Free("x"), 0.0)
    assert world.select(other, **hint, excluded_worker_ids=[2]).rank == rank(1)


# ── Busy ─────────────────────────────────────────────────────────────────────────────────────────

TOKENS = EligibilitySettings(BusyThresholds(active_prefill_tokens_threshold=30), hysteresis=0.5)


def test_a_busy_rank_gets_nothing_more_until_it_is_below_the_band():
    world = world_of({}, {}, gate=TOKENS)
    pinned = {"pinned_worker": RankTarget(1)}
    world.book("x", PROMPT, **pinned)
    assert world.core.busy_ranks(Scope()) == [rank(1)]
    assert all(world.select([7, 7, 7, i]).rank == rank(2) for i in range(4))
    with pytest.raises(WorkersOverloadedError) as caught:
        world.select(PROMPT, **pinned)
    assert (caught.value.worker_id, caught.value.http_status) == (1, 529)
    assert caught.value.removed[-1] == RemovedRanks("busy", 1, ["1.0"])
    world.book("y", list(range(900, 920)), pinned_worker=RankTarget(2))
    world.core.handle(Free("x"), 0.0)
    assert world.core.busy_ranks(Scope()) == []


def test_within_the_band_a_rank_stays_what_it_is():
    world = world_of({}, gate=TOKENS)
    world.book("a", list(range(100, 120)))
    world.book("b", list(range(200, 220)))
    with pytest.raises(WorkersOverloadedError) as caught:
        world.select(PROMPT)
    assert caught.value.worker_id is None
    world.core.handle(Free("a"), 0.0)
    assert world.core.busy_ranks(Scope()) == [rank(1)], "20 of 30 tokens, and the band is to 15"
    world.core.handle(PrefillComplete("b"), 0.0)
    assert world.core.busy_ranks(Scope()) == []
    world.book("c", list(range(300, 320)))
    assert world.core.busy_ranks(Scope()) == []


def test_each_rank_of_a_worker_is_judged_by_itself():
    world = World(gate=TOKENS)
    world.worker(1, data_parallel_size=2)
    world.book("x", PROMPT, pinned_worker=RankTarget(1, 0))
    assert world.select([1, 2, 3, 4]).rank == rank(1, 1)


def test_a_hard_session_is_refused_while_its_rank_is_busy_and_a_soft_one_goes_elsewhere():
    for is_hard in (True, False):
        thresholds = BusyThresholds(active_prefill_tokens_threshold=30)
        world = world_of({}, {}, gate=EligibilitySettings(thresholds, 0.1, is_hard))
        world.book("x", PROMPT, pinned_worker=RankTarget(1))
        bound = {"affinity_target": RankTarget(1, 0)}
        if is_hard:
            with pytest.raises(WorkersOverloadedError) as caught:
                world.select(PROMPT, **bound)
            assert caught.value.worker_id == 1
        else:
            assert world.select(PROMPT, **bound).rank == rank(2)


def test_blocks_in_use_are_booked_or_freshly_reported():
    decode = BusyThresholds(active_decode_blocks_threshold=0.5)
    world = World(gate=EligibilitySettings(decode))
    world.worker(1, total_kv_blocks=20, agent_is_engine=False)
    assert world.core.busy_ranks(Scope()) == []
    said = {"event_id": 1, "gauges": LoadGauges(kv_used_blocks=11)}
    world.core.handle(ApplyLoad(report(1, **said)), 0.0)
    assert world.core.busy_ranks(Scope()) == [rank(1)]
    world.core.handle(Tick(), LATE)
    assert world.core.busy_ranks(Scope()) == [], "it is silent: what it said no longer counts"
    world.book("x", list(range(11 * BLOCK_SIZE)), now_s=LATE)
    assert world.core.busy_ranks(Scope()) == [rank(1)]


def test_fractions_of_an_unknown_capacity_do_not_count():
    """Dynamo takes 10,000,000 tokens a step, and no fraction of blocks."""
    fractions = BusyThresholds(
        active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold_frac=1e-6
    )
    for known, busy in ((1, [rank(1)]), (0, [])):
        world = World(gate=EligibilitySettings(fractions))
        world.worker(1, total_kv_blocks=known, max_num_batched_tokens=known)
        world.book("x", [1, 2, 3])
        assert world.core.busy_ranks(Scope()) == busy


def test_thresholds_are_of_a_model():
    world = World()
    world.worker(1)
    world.worker(2, model_name="other")
    world.core.handle(
        SetBusyThresholds("other", BusyThresholds(active_prefill_tokens_threshold=0)), 0.0
    )
    world.book("x", PROMPT)
    world.book("y", PROMPT, model_name="other")
    assert world.core.busy_ranks(Scope()) == []
    assert world.core.busy_ranks(Scope("other")) == [rank(2)]


# ── What is counted ──────────────────────────────────────────────────────────────────────────────


def load(world, worker_id=1):
    active = world.core.tracker.active(rank(worker_id))
    return active.active_blocks, active.active_prefill_tokens


def twice(**tracking):
    world = world_of({}, tracking=TrackedParts(**tracking))
    world.book("x", PROMPT)
    world.book("y", PROMPT)
    return world


def test_load_counts_a_common_prefix_once():
    world = twice()
    assert load(world) == (10, 80)
    world.core.handle(OutputBlock("x", None), 0.0)
    assert load(world) == (11, 80)


def test_without_assumed_reuse_each_has_its_own():
    world = twice(kv_reuse=False)
    assert load(world) == (20, 80)
    assert world.select(PROMPT).choice.chosen.potential_decode_blocks == 30


def test_a_request_may_disclaim_reuse_by_itself():
    world = twice()
    own = ConfigOverride(assume_kv_reuse=False)
    table = world.select(PROMPT, router_config_override=own).choice
    assert table.chosen.potential_decode_blocks == 20
    world.book("z", PROMPT, router_config_override=own)
    assert load(world) == (20, 120)


def test_without_prefill_only_blocks_are_counted():
    assert load(twice(prefill_tokens=False)) == (10, 0)
    world = twice()
    untracked = ConfigOverride(track_prefill_tokens=False)
    world.book("z", PROMPT, router_config_override=untracked)
    assert load(world) == (10, 80)


def test_without_blocks_only_prefill_is_counted_and_policies_know():
    """Dynamo 1.0 takes as many decode blocks as there are whole blocks of prefill."""
    world = twice(active_blocks=False)
    assert load(world) == (0, 80)
    world.core.handle(OutputBlock("x", 0.5), 0.0)
    assert load(world) == (0, 80)
    choice = world.select(PROMPT).choice
    assert isnan(choice.table.column(DECODE_BLOCKS)[0])
    assert choice.costs.tolist() == [30.0 + 30.0]
    assert choice.chosen.potential_decode_blocks == 0


def test_an_output_block_that_is_not_counted_is_a_sign_of_life():
    world = World(tracking=TrackedParts(output_blocks=False), reservation_ttl_s=10.0)
    world.worker(1, agent_is_engine=False)
    world.book("x", PROMPT)
    world.core.handle(OutputBlock("x", None), 9.0)
    assert load(world) == (10, 40)
    world.core.handle(Tick(), 11.0)
    assert load(world) == (10, 40)
    world.core.handle(Tick(), 19.0)
    assert load(world) == (0, 0)


# ── Phases of a request ──────────────────────────────────────────────────────────────────────────


def pools(**fields):
    world = World(**fields)
    for worker_id, role in enumerate(("prefill", "prefill", "decode", "decode"), start=1):
        world.worker(worker_id, role=role)
    return world


def test_each_phase_has_its_pool_and_the_others_are_removed_by_role():
    world = pools()
    assert {world.select(PROMPT, phase="prefill").rank.worker_id for _ in range(20)} == {1, 2}
    assert {world.select(PROMPT, phase="decode").rank.worker_id for _ in range(20)} == {3, 4}
    assert {world.select(PROMPT).rank.worker_id for _ in range(20)} == {3, 4}
    assert refused(world, phase="prefill", allowed_worker_ids=[3]).removed == [
        RemovedRanks("role", 2, ["3.0", "4.0"]),
        RemovedRanks("allowed_worker_ids", 2, ["1.0", "2.0"]),
    ]


def test_a_prompt_goes_where_it_is_cached_and_where_least_is_to_be_computed():
    world = pools()
    world.cache(rank(2), PROMPT)
    assert world.select(PROMPT, phase="prefill").rank == rank(2)
    world.book("x", list(range(7000, 7800)), phase="prefill", pinned_worker=RankTarget(2))
    assert world.select(PROMPT, phase="prefill").rank == rank(1)


def test_of_a_prompt_for_others_no_block_is_counted_and_of_what_follows_no_prefill():
    world = pools()
    world.book("p", PROMPT, phase="prefill", pinned_worker=RankTarget(1))
    world.book("d", PROMPT, phase="decode", pinned_worker=RankTarget(3))
    world.book("a", PROMPT, phase="aggregated", pinned_worker=RankTarget(4))
    assert [load(world, each) for each in (1, 3, 4)] == [(0, 40), (10, 0), (10, 40)]


@pytest.mark.parametrize("policy", ["dynamo-1.0", "dynamo-1.6"])
def test_decode_phase_goes_to_the_least_decode_load(policy):
    world, asked = pools(), ConfigOverride(policy=policy)
    world.cache(rank(3), PROMPT)
    world.book("x", list(range(7000, 7400)), phase="decode", pinned_worker=RankTarget(3))
    where = {"router_config_override": asked}
    assert world.select(PROMPT, phase="decode", **where).rank == rank(4)
    world.core.handle(Free("x"), 0.0)
    assert world.select(PROMPT, phase="aggregated", **where).rank == rank(3)


def test_decode_worker_computes_whole_requests_like_others():
    world, predictive = pools(), ConfigOverride(policy="predictive")
    table = world.select(PROMPT, phase="aggregated", router_config_override=predictive).choice.table
    assert table.column(DECODE_SIDE).tolist() == [0, 0]
    table = world.select(PROMPT, router_config_override=predictive).choice.table
    assert table.column(DECODE_SIDE).tolist() == [1, 1]


# ── Thresholds, asked and changed ────────────────────────────────────────────────────────────────


def test_thresholds_are_changed_by_name_and_taken_away_by_null():
    world = world_of({}, gate=TOKENS)
    commands = BusyCommands(world.core)
    world.book("x", PROMPT)
    (shown,) = commands.all().thresholds
    assert (shown.model, shown.active_prefill_tokens_threshold) == ("default", 30)
    assert shown.busy == [BusyRank(1, 0, "default")]
    changed = commands.change(
        BusyThresholdRequest(model="default", active_decode_blocks_threshold=0.5)
    )
    assert changed.active_prefill_tokens_threshold == 30
    freed = commands.change(
        BusyThresholdRequest(model="default", active_prefill_tokens_threshold=None)
    )
    assert (freed.active_decode_blocks_threshold, freed.busy) == (0.5, [])
    assert commands.change(BusyThresholdRequest(model="default")) == freed
    assert world.select(PROMPT).rank == rank(1)


def test_a_model_that_is_not_served_yet_may_have_thresholds():
    world = world_of({})
    wanted = BusyThresholdRequest(model="soon", active_prefill_tokens_threshold=7)
    BusyCommands(world.core).change(wanted)
    assert [each.model for each in BusyCommands(world.core).all().thresholds] == ["default", "soon"]
