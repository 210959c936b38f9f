"""Requests that wait for a rank, over HTTP and NATS: placed in time, refused, or given up."""

import asyncio
import json

import pytest

from router.runtime.bus.connection import connection
from router.scheduler.settings import DEFAULT_POLICY
from support.processes.running import RunningRouter
from support.processes.servers import eventually

PROMPT = list(range(40))
BOOK = "/select_and_reserve"


@pytest.fixture(params=["dynamo-1.0", DEFAULT_POLICY])
def policy(request):
    return request.param


@pytest.fixture
async def router(nats_server, policy, request):
    """One worker, busy while any prompt is to be computed there."""
    limit = getattr(request, "param", 2)
    queueing = {
        "router_queue_threshold": 0.0,
        "max_waiting_requests": limit,
        "max_bus_requests": 8,
        "policy": policy,
    }
    async with RunningRouter(nats_server.url, **queueing).running() as router:
        await router.worker(1)
        assert (await router.post(BOOK, asked("first"))).status_code == 200
        yield router


def asked(request_id, **fields):
    return {"token_ids": PROMPT, "request_id": request_id, **fields}


async def waiting(router, count=1):
    async def waits():
        return (await router.client.get("/loads")).json()[0]["pending_count"] == count

    await eventually(waits)


async def test_a_request_waits_until_a_prompt_is_computed(router):
    later = asyncio.create_task(router.post(BOOK, asked("second")))
    await waiting(router)
    assert (await router.client.get("/loads")).json()[0]["pending_isl_tokens"] == 40
    assert not later.done()
    await router.client.post("/reservations/first/prefill_complete")
    decision = (await later).json()
    assert (decision["request_id"], decision["worker_id"]) == ("second", 1)
    assert decision["waited_s"] > 0
    assert await router.metric("kv_router_reservations") == 2
    line = 'kv_router_wait_seconds_count{policy_class="default"}'
    assert await router.metric(line) == 1


async def test_request_waits_until_another_ends(router):
    later = asyncio.create_task(router.post(BOOK, asked("second")))
    await waiting(router)
    await router.client.delete("/reservations/first")
    assert (await later).status_code == 200


async def test_request_waits_until_a_worker_joins(router):
    # Minutes to compute, so that the new worker is sooner ready however slow the test's machine is.
    minutes = list(range(100_000))
    long = asked("long", token_ids=minutes)
    await router.client.delete("/reservations/first")
    assert (await router.post(BOOK, long)).status_code == 200
    another = list(range(1_000, 1_040))  # a started prompt is best computed once, by its worker
    later = asyncio.create_task(router.post(BOOK, asked("second", token_ids=another)))
    await waiting(router)
    await router.worker(2)
    assert (await later).json()["worker_id"] == 2


async def test_selection_never_waits(router):
    assert (await router.post("/select", asked("second"))).status_code == 200


async def test_queue_timeout_has_a_retry_after(router):
    answer = await router.post(BOOK, asked("second", max_wait_s=0.3))
    body = answer.json()
    assert (answer.status_code, body["code"], body["policy_class"]) == (
        529, "queue_timeout", "default",
    )  # fmt: skip
    assert 10 <= int(answer.headers["retry-after"]) <= 20, "40 tokens at 40 in ten seconds"
    assert body["waited_s"] >= 0.3
    assert await router.metric("kv_router_reservations") == 1


async def test_no_more_wait_than_may_and_tenants_share_the_room(router):
    flood = []
    for count, each in enumerate("ab", start=1):
        flood.append(asyncio.create_task(router.post(BOOK, asked(each, tenant="flood"))))
        await waiting(router, count)
    answer = await router.post(BOOK, asked("c", tenant="flood"))
    assert (answer.status_code, answer.json()["code"]) == (529, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    header = {"x-llm-d-inference-fairness-id": "small"}
    small = asyncio.create_task(router.post(BOOK, asked("d"), headers=header))
    displaced = await flood[1]
    assert (displaced.status_code, displaced.json()["code"]) == (429, "tenant_queue_full")
    assert displaced.json()["tenant"] == "flood"
    await router.client.delete("/reservations/first")
    assert (await flood[0]).status_code == 200
    await router.client.post("/reservations/a/prefill_complete")
    assert (await small).status_code == 200


async def test_an_id_waits_once_and_is_withdrawn_by_freeing_it(router):
    later = asyncio.create_task(router.post(BOOK, asked("second")))
    await waiting(router)
    answer = await router.post(BOOK, asked("second"))
    assert (answer.status_code, answer.json()["code"]) == (409, "duplicate_reservation")
    assert (await router.client.delete("/reservations/second")).status_code == 200
    answer = await later
    assert (answer.status_code, answer.json()["code"]) == (409, "withdrawn")
    await waiting(router, 0)


async def test_disconnected_caller_leaves_the_queue(router):
    asking = asyncio.create_task(router.post(BOOK, asked("second")))
    await waiting(router)
    asking.cancel()
    await waiting(router, 0)
    assert await router.metric("kv_router_withdrawn_total") == 1
    await router.client.delete("/reservations/first")
    assert await router.metric("kv_router_reservations") == 0
    assert (await router.client.get("/health")).status_code == 200


async def test_draining_router_refuses_waiting_requests(router):
    later = asyncio.create_task(router.post(BOOK, asked("second")))
    await waiting(router)
    router.stop()
    answer = await later
    assert (answer.status_code, answer.json()["code"]) == (503, "draining")
    assert answer.headers["retry-after"] == "1"


async def test_metrics_count_waiting_requests(router):
    later = asyncio.create_task(router.post(BOOK, asked("second")))
    await waiting(router)
    labels = '{model_name="default",policy_class="default",routing_group="default"}'
    assert await router.metric(f"kv_router_waiting_requests{labels}") == 1
    assert await router.metric(f"kv_router_waiting_tokens{labels}") == 40
    assert await router.metric("kv_router_waiting_requests_max") == 2
    await router.client.delete("/reservations/first")
    await later
    assert await router.metric(f"kv_router_waiting_requests{labels}") == 0


# ── Over NATS ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def ask(router, nats_server):
    async with connection(nats_server.url, "caller", lambda _: None) as bus:

        async def ask(timeout_s=60, **body):
            answer = await bus.client.request(
                "kv.test.router", json.dumps(body).encode(), timeout=timeout_s
            )
            return json.loads(answer.data)

        yield ask


async def new(ask, request_id, **fields):
    return await ask(method="new", tokens=PROMPT, request_id=request_id, **fields)


@pytest.mark.parametrize("router", [100], indirect=True)
async def test_waiting_nats_requests_do_not_block_others(router, ask):
    """More than are answered at once; what frees a rank comes the same way."""
    tasks = [asyncio.create_task(new(ask, f"n{i}")) for i in range(16)]
    await waiting(router, 16)
    loads = await ask(method="potential_loads", tokens=PROMPT)
    assert (loads["pending_count"], loads["pending_isl_tokens"]) == (16, 16 * 40)
    await ask(method="mark_free", request_id="first")
    for i in range(16):
        answer = await tasks[i]
        assert (answer["method"], answer["request_id"]) == ("new", f"n{i}")
        assert (await ask(method="mark_prefill", request_id=f"n{i}"))["success"]


async def test_nats_refusal_equals_the_http_one(ask):
    answer = await new(ask, "second", max_wait_s=0.2)
    assert (answer["method"], answer["code"]) == ("error", "queue_timeout")
    assert 10 < answer["retry_after_s"] < 20
