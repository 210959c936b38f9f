"""Sessions over HTTP: where they stay, and what two routers that share them make of a race."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from support.fleets.direct import DirectRouter
from support.processes.servers import equals, eventually

HOUR_S = 3600.0
SESSION = "conversation 1"
OTHER = list(range(1000, 1400))
WAITING = "kv_router_waiting_requests"
WAITING += '{model_name="default",policy_class="default",routing_group="default"}'


async def started(stack, **fields):
    """A router with three workers, of which nothing is known but that they are there."""
    settings = {"session_affinity_ttl_s": HOUR_S, "use_kv_events": False, **fields}
    router = await stack.enter_async_context(DirectRouter(**settings).running())
    for worker_id in (1, 2, 3):
        body = {"worker_id": worker_id, "endpoint": "http://w", "block_size": 4}
        body["max_num_batched_tokens"] = 1000
        assert (await router.post("/workers", body)).json()["lifecycle"] == "schedulable"
    return router


@pytest.fixture
async def stack():
    async with AsyncExitStack() as stack:
        yield stack


async def placed(router, request_id, path="/select_and_reserve", **fields):
    body = {"token_ids": list(range(40)), "request_id": request_id, "session_id": SESSION, **fields}
    answer = await router.post(path, body)
    return answer.json()["worker_id"] if answer.status_code == 200 else answer


async def booked(router):
    """Requests booked on each worker."""
    loads = (await router.client.get("/loads")).json()[0]["loads"]
    return [each["active_requests"] for each in loads]


async def test_a_session_stays_where_it_was_served_first(stack):
    router = await started(stack)
    home = await placed(router, "a", pinned_worker={"worker_id": 2})
    assert home == 2
    assert [await placed(router, f"b{i}") for i in range(5)] == [2] * 5
    assert await placed(router, None, "/select") == 2
    assert await placed(router, "c", session_id="another", token_ids=OTHER) != 2
    assert await router.metric("kv_router_sessions") == 2.0


async def test_the_last_request_of_a_session_releases_it(stack):
    router = await started(stack)
    await placed(router, "a", pinned_worker={"worker_id": 2})
    assert await placed(router, "b", token_ids=OTHER, session_is_final=True) == 2
    assert await router.metric("kv_router_sessions") == 0.0
    for request_id in "ab":
        await router.client.delete(f"/reservations/{request_id}")
    await placed(router, "c", pinned_worker={"worker_id": 3})
    assert await placed(router, None, "/select") == 3


async def test_a_hint_is_not_followed_to_a_rank_that_costs_more(stack):
    router = await started(stack)
    hint = {"session_is_hint": True}
    await placed(router, "a", pinned_worker={"worker_id": 2}, **hint)
    await router.client.delete("/reservations/a")
    assert {await placed(router, None, "/select", token_ids=[7], **hint) for _ in range(6)} == {2}
    await placed(router, "b", pinned_worker={"worker_id": 2}, token_ids=OTHER, session_id="other")
    assert await placed(router, "c", token_ids=[7], **hint) != 2
    await router.client.delete("/reservations/b")
    await router.client.delete("/reservations/c")
    assert await placed(router, None, "/select", token_ids=[7], **hint) == 2, "it is not rebound"


async def test_a_session_may_be_named_in_a_header(stack):
    router = await started(stack)
    await placed(router, "a", pinned_worker={"worker_id": 2})
    body, headers = {"token_ids": OTHER}, {"X-Dynamo-Session-ID": SESSION}
    answer = await router.post("/select", body, headers=headers)
    assert answer.json()["worker_id"] == 2


async def test_a_request_that_waited_binds_its_session(stack):
    router = await started(stack, router_queue_threshold=0.001)
    for worker_id in (1, 2, 3):
        load = {"request_id": f"x{worker_id}", "worker_id": worker_id, "token_ids": OTHER}
        await router.post("/reservations", load)
    waiting = asyncio.create_task(placed(router, "a"))
    await eventually(lambda: equals(router.metric(WAITING), 1.0))
    assert not waiting.done()
    await router.client.delete("/reservations/x2")
    assert await waiting == 2
    assert await router.metric("kv_router_sessions") == 1.0
    assert await placed(router, None, "/select") == 2


async def test_a_selection_that_is_booked_binds_its_session(stack):
    router = await started(stack)
    home = await placed(router, None, "/select", selection_id="s")
    assert await router.metric("kv_router_sessions") == 0.0
    assert (await router.post("/reservations", {"selection_id": "s"})).status_code == 201
    assert await router.metric("kv_router_sessions") == 1.0
    assert [await placed(router, f"b{i}", token_ids=OTHER) for i in range(3)] == [home] * 3


async def test_selection_without_booking_binds_no_session(stack):
    router = await started(stack)
    await placed(router, None, "/select")
    assert await router.metric("kv_router_sessions") == 0.0


async def test_a_session_moves_when_its_worker_may_not_be_chosen(stack):
    router = await started(stack)
    await placed(router, "a", pinned_worker={"worker_id": 2})
    await router.client.patch("/workers/2", json={"lifecycle": "cordoned"})
    moved = await placed(router, "b")
    assert moved != 2
    await router.client.patch("/workers/2", json={"lifecycle": "schedulable"})
    assert await placed(router, "c") == moved, "it is bound anew"


@pytest.mark.parametrize("mode", ["hard", "soft"])
async def test_while_its_worker_is_busy_a_session_is_refused_or_goes_elsewhere(stack, mode):
    router = await started(stack, session_affinity_mode=mode, active_prefill_tokens_threshold=30)
    await placed(router, "a", pinned_worker={"worker_id": 2})
    answer = await placed(router, "b")
    if mode == "hard":
        assert (answer.status_code, answer.json()["code"]) == (529, "workers_overloaded")
        assert answer.json()["removed"][-1] == {"filter": "busy", "count": 1, "ranks": ["2.0"]}
    else:
        assert answer != 2
    await router.client.delete("/reservations/a")
    assert await placed(router, "c") == 2, "home it goes"


async def test_routers_that_share_sessions_agree(stack, redis_port):
    url = f"redis://127.0.0.1:{redis_port}"
    shared = {"redis_url": url, "redis_timeout_s": 10.0}
    routers = [await started(stack, name=name, **shared) for name in "ab"]
    for i in range(8):
        name = f"session {i}"
        both = [placed(each, f"{i}", session_id=name) for each in routers]
        homes = await asyncio.gather(*both)
        assert homes[0] == homes[1], "whoever lost the race has placed its request again"
        assert {await placed(each, f"x{i}", session_id=name) for each in routers} == {homes[0]}
        for each in routers:
            for request_id in (f"{i}", f"x{i}"):
                await each.client.delete(f"/reservations/{request_id}")


async def test_losing_router_moves_its_booking_to_the_bound_rank(stack, redis_port):
    """Redis takes no writes for a while, so both have booked before one of them is first."""
    url = f"redis://127.0.0.1:{redis_port}"
    routers = []
    for name, home in (("a", 1), ("b", 3)):
        router = await started(stack, name=name, redis_url=url, redis_timeout_s=10.0)
        for other in {1, 2, 3} - {home}:
            load = {"request_id": f"{other}", "worker_id": other, "token_ids": OTHER}
            assert (await router.post("/reservations", load)).status_code == 201
        routers.append(router)
    client = await stack.enter_async_context(Redis.from_url(url))
    await client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
    asked = [asyncio.create_task(placed(each, "x")) for each in routers]
    for each in routers:
        await eventually(lambda each=each: equals(booked(each), [1, 1, 1]))
    await client.execute_command("CLIENT", "UNPAUSE")
    homes = await asyncio.gather(*asked)
    assert homes in ([1, 1], [3, 3])
    won, lost = [1, 1, 1], [0, 1, 2] if homes[0] == 3 else [2, 1, 0]
    assert sorted([await booked(each) for each in routers]) == sorted([won, lost])
    line = "kv_router_sessions_moved_total"
    assert sorted([await each.metric(line) for each in routers]) == [0.0, 1.0]


async def test_without_redis_sessions_are_each_routers_own(stack):
    router = await started(stack, redis_url="redis://127.0.0.1:1", redis_timeout_s=0.5)
    home = await placed(router, "a")
    assert [await placed(router, f"b{i}") for i in range(3)] == [home] * 3
    line = 'kv_router_session_store_failures_total{operation="find"}'
    assert await router.metric(line) >= 1.0
