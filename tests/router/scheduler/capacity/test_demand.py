"""Demand and workers, against figures counted by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.scheduler.capacity.arrivals import (
    CONTEXTS,
    HELD_BLOCKS,
    HELD_REQUESTS,
    ISL_TOKENS,
    REQUESTS,
    TOKENS,
    WORK_COLUMNS,
    Arrivals,
)
from router.scheduler.capacity.demand import PoolRanks, demand_on
from router.scheduler.capacity.scaling import lacking_workers, spare_workers
from router.sequence import rank_table

BASE_S, TOKEN_S, DECODE_S, KV_S = 0.01, 1e-4, 2e-4, 1e-8
TARGET = 0.75


def ranks(workers=(0, 1), *, slowness=(), output_tokens=100.0, blocks=1000):
    rows = np.zeros((len(workers), rank_table.RANK_COLUMNS))
    rows[:, rank_table.BLOCK_SIZE], rows[:, rank_table.CAPACITY_BLOCKS] = 16, blocks
    rows[:, rank_table.CHUNK_TOKENS] = 2048
    rates = [BASE_S, TOKEN_S, 0.0, DECODE_S, KV_S]
    rows[:, rank_table.BASE_S : rank_table.KV_S + 1] = rates
    for rank, factor in enumerate(slowness):
        rows[rank, rank_table.BASE_S : rank_table.KV_S + 1] *= factor
    return PoolRanks(rows, np.array(workers), np.zeros(len(workers)), output_tokens)


def arrivals(requests, *, tokens=500, isl_tokens=1500, blocks_each=0, now_s=60.0):
    found, work = Arrivals(60.0, now_s - 60.0), np.zeros(WORK_COLUMNS)
    work[[REQUESTS, TOKENS, ISL_TOKENS]] = np.array([1, tokens, isl_tokens]) * requests
    work[CONTEXTS] = requests * tokens * (isl_tokens - tokens / 2)
    work[[HELD_BLOCKS, HELD_REQUESTS]] = 10 * blocks_each, 10
    found.add(work, now_s)
    return found


def demand(pool, arrived, waiting=0, active=0):
    return demand_on(pool, arrived, waiting, active, TARGET, 60.0)


def test_seconds_of_a_request_are_those_of_a_full_rank():
    at_once = 16 * 1000 / 1600
    steps_s = BASE_S * 100 / at_once
    by_hand_s = 500 * TOKEN_S + 100 * (DECODE_S + 1550 * KV_S) + steps_s
    found = demand(ranks(), arrivals(60 * 5))
    assert found.seconds_per_request == pytest.approx(by_hand_s)
    assert found.saturation == pytest.approx(5 * by_hand_s / 2)
    assert found.most_requests_per_s == pytest.approx([1 / by_hand_s] * 2)


def test_blocks_that_requests_share_leave_room_for_more_at_once():
    alone = demand(ranks(), arrivals(300))
    sharing = demand(ranks(), arrivals(300, blocks_each=10))
    assert sharing.seconds_per_request < alone.seconds_per_request


def test_limit_of_the_engine_counts_if_memory_holds_more():
    pool = ranks(blocks=100_000)
    few = PoolRanks(pool.rows, pool.workers, np.array([4.0, 4.0]), pool.output_tokens)
    limited, unlimited = demand(few, arrivals(300)), demand(pool, arrivals(300))
    steps = 100 / 4 - 500 / 2048  # without the limit, the chunks of the prompt are more steps
    more_s = limited.seconds_per_request - unlimited.seconds_per_request
    assert more_s == pytest.approx(BASE_S * steps)


def test_prefill_takes_the_steps_of_its_chunks():
    pool = ranks(output_tokens=0.0)
    by_hand_s = 500 * TOKEN_S + BASE_S * 500 / 2048
    assert demand(pool, arrivals(60)).seconds_per_request == pytest.approx(by_hand_s)


@pytest.mark.parametrize(
    ("load", "workers", "spare", "lacking"),
    [(0.1, 4, 3, 0), (0.5, 4, 1, 0), (0.74, 4, 0, 0), (0.76, 4, 0, 1), (1.6, 4, 0, 5)],
)
def test_workers_are_counted_up_to_the_target(load, workers, spare, lacking):
    pool = ranks(tuple(range(workers)))
    most = float(demand(pool, arrivals(1)).most_requests_per_s.sum())
    found = demand(pool, arrivals(60 * load * most))
    assert found.saturation == pytest.approx(load)
    assert (found.spare, found.lacking) == (spare, lacking)
    assert found.needed == workers - spare + lacking


def test_ranks_of_a_worker_go_together_and_the_fastest_may_go_first():
    pool = ranks((0, 0, 1, 1), slowness=(1, 1, 2, 2))
    most = demand(pool, arrivals(1)).most_requests_per_s
    slow_worker = float(most[2:].sum())
    assert demand(pool, arrivals(60 * TARGET * slow_worker * 0.99)).spare == 1
    assert demand(pool, arrivals(60 * TARGET * slow_worker * 1.01)).spare == 0


def test_waiting_requests_are_demand_and_running_ones_keep_a_worker():
    pool = ranks()
    assert demand(pool, arrivals(60), waiting=60).requests_per_s == pytest.approx(2.0)
    idle = Arrivals(60.0, 0.0)
    assert (demand(pool, idle).needed, demand(pool, idle).spare) == (0, 2)
    assert (demand(pool, idle, active=3).needed, demand(pool, idle, active=3).spare) == (1, 1)
    assert demand(pool, idle, waiting=1).needed == 2


def test_spare_workers_are_those_of_the_highest_window():
    pool, found = ranks((0, 1, 2, 3)), Arrivals(60.0, 0.0)
    most = float(demand(pool, arrivals(1)).most_requests_per_s.sum())
    work = np.zeros(WORK_COLUMNS)
    work[[REQUESTS, TOKENS, ISL_TOKENS]] = np.array([1, 500, 1500]) * 10 * most
    work[CONTEXTS] = 10 * most * 500 * 1250
    for bucket in range(1, 30):  # 60 %, and 30 % from the third minute on
        found.add(work * (0.6 if bucket < 12 else 0.3), 10.0 * bucket + 5)
    now = demand_on(pool, found, 0, 0, TARGET, 299.9)
    assert now.saturation == pytest.approx(0.3, rel=0.01)
    assert now.peak_saturation == pytest.approx(0.6, rel=0.01)
    assert (now.spare, now.lacking, now.needed) == (0, 0, 4)


@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8),
    st.floats(0.0, 100.0),
    st.floats(0.1, 1.0),
)
def test_spare_workers_leave_enough_whichever_go(most, requests_per_s, target):
    most = np.array(most)
    spare = spare_workers(requests_per_s, most, target)
    lacking = lacking_workers(requests_per_s, most, target)
    kept = np.sort(most)[: len(most) - spare]
    if spare:
        assert requests_per_s <= target * kept.sum() * (1 + 1e-6)
        assert lacking == 0
    grown = most.sum() + lacking * most.mean()
    assert requests_per_s <= target * grown * (1 + 1e-6)
    assert lacking == 0 or requests_per_s > target * (grown - most.mean()) * (1 - 1e-6)
