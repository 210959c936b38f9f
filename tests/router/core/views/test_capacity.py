"""What scalers read of the state."""

import pytest

from router.core.commands import Free, OrderWorker, RemoveWorker, Tick
from router.core.views.capacity import capacity
from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges
from support.values.builders import World, rank

STEP_S, TOKEN_S = 0.01, 1e-4
OUTPUT = 21


@pytest.fixture
def world():
    world = World(default_policy="predictive")
    world.worker(1)
    return world


def work(world, worker_id, seconds, begin_s=0.0, requests_per_s=1):
    """Let a rank report, each second, prompts of 1,000 tokens with outputs; it is busy for half."""
    for second in range(1, seconds + 1):
        done = second * requests_per_s
        counters = LoadCounters(
            steps=done * OUTPUT,
            busy_s=done * (OUTPUT * STEP_S + 1000 * TOKEN_S),
            prefill_tokens=done * 1000,
            decode_requests=done * OUTPUT,
            requests_received=done,
            requests_finished=done,
        )
        constants = LoadConstants(chunk_tokens=2048, max_running_requests=64)
        fields = {"gauges": LoadGauges(), "counters": counters, "constants": constants}
        for number in range(requests_per_s):
            request_id = f"{worker_id}.{second}.{number}"
            now_s = begin_s + second
            prompt = [second, number, *range(998)]
            world.book(request_id, prompt, now_s, allowed_worker_ids=[worker_id])
            world.core.handle(Free(request_id), now_s)
        world.report_load(rank(worker_id), begin_s + second, **fields)
        world.core.handle(Tick(), begin_s + second)
    return begin_s + seconds


def test_idle_fleet_could_go(world):
    world.core.handle(Tick(), 1.0)
    (pool,) = capacity(world.core, 1.0)
    assert (pool.saturation, pool.demand_s_per_s, pool.headroom_s_per_s) == (0, 0, 1)
    assert (pool.workers_needed, pool.workers_spare, pool.workers_wanted) == (0, 1, 0)
    assert pool.mean_request is None
    assert pool.headroom_requests_per_s is None
    assert pool.predicted_wait_s is None


def test_work_that_was_never_measured_is_unknown_with_the_reason(world):
    world.book("a", list(range(100)), 1.0)
    world.core.handle(Tick(), 1.0)
    (pool,) = capacity(world.core, 1.0)
    assert pool.confidence == "unknown"
    assert [reason.partition(":")[0] for reason in pool.reasons] == [
        "no work of this model was measured yet",
        "output lengths unknown",
    ]
    unknown = (pool.saturation, pool.workers_needed, pool.booked_s, pool.headroom_s_per_s)
    assert unknown == (None,) * 4
    assert (pool.requests_per_s, pool.active_requests) == (0.1, 1)
    assert (pool.kv_booked_blocks, pool.kv_capacity_blocks, pool.kv_usage) == (25, 1000, 0.025)


def test_measured_work_is_demand_in_seconds(world):
    now_s = work(world, 1, 90)
    (pool,) = capacity(world.core, now_s)
    assert pool.confidence == "measured"
    assert pool.requests_per_s == pytest.approx(1.0, rel=0.03)
    request = pool.mean_request
    assert (request.isl_tokens, request.uncached_tokens) == (1000, 1000)
    assert request.output_tokens == pytest.approx(OUTPUT)
    assert pool.saturation == pytest.approx(pool.requests_per_s * request.seconds, rel=1e-3)
    assert pool.headroom_s_per_s == pytest.approx(1 - pool.saturation, rel=1e-3)
    # All requests of a rank that is full take less than a request alone.
    assert request.seconds < OUTPUT * STEP_S + 1000 * TOKEN_S
    assert pool.headroom_requests_per_s == pytest.approx(1 / request.seconds - 1, rel=0.05)
    (load,) = pool.loads
    assert load.most_requests_per_s == pytest.approx(1 / request.seconds, rel=1e-3)


def test_booked_work_is_shown_until_it_is_done(world):
    now_s = work(world, 1, 20)
    (idle,) = capacity(world.core, now_s)
    assert idle.booked_s == pytest.approx(0, abs=0.02)
    for number in range(4):
        world.book(f"b{number}", [7 + number, *range(999)], now_s)
    (pool,) = capacity(world.core, now_s)
    assert pool.booked_s > 4 * 1000 * TOKEN_S * 0.5
    assert pool.loads[0].queue_s <= pool.loads[0].booked_s
    assert pool.predicted_wait_s > pool.loads[0].queue_s  # its memory is full, too
    for number in range(4):
        world.core.handle(Free(f"b{number}"), now_s)
    assert capacity(world.core, now_s)[0].booked_s == idle.booked_s


def test_only_schedulable_workers_supply_anything(world):
    now_s = work(world, 1, 30)
    world.worker(2, now_s, data_parallel_size=2)
    world.core.handle(OrderWorker(2, "cordoned"), now_s)
    world.core.handle(Tick(), now_s)
    (pool,) = capacity(world.core, now_s)
    assert (pool.workers, pool.schedulable_workers) == (2, 1)
    assert (pool.ranks, pool.schedulable_ranks, pool.supply_s_per_s) == (3, 1, 1)
    assert [load.is_schedulable for load in pool.loads] == [True, False, False]


def test_pool_without_workers_needs_one_while_requests_arrive(world):
    now_s = work(world, 1, 5)
    world.core.handle(RemoveWorker(1, "removed"), now_s)
    world.core.handle(Tick(), now_s + 1)
    (pool,) = capacity(world.core, now_s + 1)
    assert (pool.workers, pool.saturation, pool.supply_s_per_s) == (0, None, 0)
    assert pool.reasons == ["no schedulable worker"]
    assert (pool.workers_needed, pool.workers_wanted) == (1, 1)
    (later,) = capacity(world.core, now_s + 100)
    assert (later.workers_needed, later.workers_wanted) == (0, 0)


def test_roles_are_pools_of_their_own(world):
    world.worker(2, role="prefill")
    world.core.handle(Tick(), 1.0)
    world.book("p", list(range(50)), 1.0, phase="prefill")
    world.core.handle(Tick(), 2.0)
    aggregated, prefill = capacity(world.core, 2.0)
    assert (aggregated.role, aggregated.requests_per_s) == ("aggregated", 0)
    assert (prefill.role, prefill.requests_per_s) == ("prefill", 0.1)
    assert prefill.mean_request.output_tokens == 0


def test_traffic_that_is_not_booked_is_a_doubt(world):
    for second in range(1, 80):
        fields = {"requests_received": 3 * second, "requests_finished": 3 * second}
        work = {"busy_s": second / 2, "prefill_tokens": 500 * second, "decode_requests": second}
        counters = LoadCounters(steps=second, **work, **fields)
        world.report_load(rank(1), float(second), counters=counters)
        world.core.handle(Tick(), float(second))
    (pool,) = capacity(world.core, 79.0)
    assert pool.confidence == "learning"
    assert "engines report 3 requests/s, and 0 are booked" in pool.reasons
