"""A router beside real Dynamo workers and Dynamo's own router, from PyPI."""

import pytest

from support.processes.running import RunningRouter
from support.processes.servers import eventually

pytestmark = pytest.mark.dynamo

FORMS = [("1.0.2", "jetstream"), ("1.0.2", "core"), ("1.6.1", "core")]
SETTINGS = {"dynamo_namespace": "ns1", "dynamo_component": "backend", "dynamo_block_size": 16}
PROMPT = list(range(48))
STREAM = "namespace-ns1-component-backend-kv-events"


def router_on(nats_server, **fields):
    return RunningRouter(nats_server.url, **SETTINGS, **fields).running()


async def overlaps(router, tokens=PROMPT, **fields):
    """Blocks on device by worker and rank."""
    answer = await router.post("/overlap_scores", {"token_ids": tokens, **fields})
    ranks = answer.json().get("workers", ())
    return {(rank["worker_id"], rank["dp_rank"]): rank["device_blocks"] for rank in ranks}


async def finds(router, expected, **fields):
    return await overlaps(router, **fields) == expected


@pytest.mark.parametrize(("version", "mode"), FORMS)
async def test_overlaps_equal_events_of_real_publishers(nats_server, fleet, version, mode):
    async with router_on(nats_server) as router:
        await eventually(lambda: router.metric("kv_router_dynamo_connected"))
        async with fleet(version).running("worker", mode) as worker:
            first = (worker.started, 0)
            await worker.ask("stored", PROMPT, [111, 222, 333])
            await eventually(lambda: finds(router, {first: 3}))
            await worker.ask("removed", [222])
            await eventually(lambda: finds(router, {first: 1}))
            await worker.ask("stored", PROMPT[16:32], [222], 111)
            await eventually(lambda: finds(router, {first: 3}))
            await worker.ask("stored", PROMPT[:16], [77], None, "adapter")
            await eventually(lambda: finds(router, {first: 1}, lora_name="adapter"))
            second = (worker.started, 1)
            await worker.ask("stored", PROMPT[:32], [1, 2], None, None, 1)
            await eventually(lambda: finds(router, {first: 3, second: 2}))
            await worker.ask("load", 9)
            await eventually(lambda: used_blocks(router, worker.started, 9))
            view = await router.view(worker.started)
            assert {r["trust"]["state"] for r in view["ranks"]} == {"lagging"}


async def used_blocks(router, worker_id, blocks):
    reported = (await router.view(worker_id))["ranks"][0]["reported"]
    return reported is not None and reported["kv_used_blocks"] == blocks


@pytest.mark.parametrize(("version", "mode"), FORMS)
async def test_a_block_stored_twice_goes_when_its_last_copy_does(nats_server, fleet, version, mode):
    """1.0.2 publishes every copy; 1.6.1 counts them, and publishes the removal of the last one."""
    async with router_on(nats_server) as router:
        await eventually(lambda: router.metric("kv_router_dynamo_connected"))
        async with fleet(version).running("worker", mode) as worker:
            rank = (worker.started, 0)
            for _ in range(2):
                await worker.ask("stored", PROMPT, [111, 222, 333])
            await worker.ask("removed", [333])
            await worker.ask("stored", [9] * 16, [444])
            await eventually(lambda: finds(router, {rank: 1}, tokens=[9] * 16))
            assert await overlaps(router) == {rank: 3}
            await worker.ask("removed", [333])
            await eventually(lambda: finds(router, {rank: 2}))


@pytest.mark.parametrize(("version", "mode"), FORMS)
async def test_dynamos_own_choices_are_booked_and_compared(nats_server, fleet, version, mode):
    async with router_on(nats_server, shadow=True) as router:
        await eventually(lambda: router.metric("kv_router_dynamo_connected"))
        dynamo = fleet(version)
        async with dynamo.running("worker", mode) as worker:
            await worker.ask("stored", PROMPT, [111, 222, 333])
            await eventually(lambda: finds(router, {(worker.started, 0): 3}))
            async with dynamo.running("router", mode) as theirs:
                await eventually(lambda: chooses(theirs, "warm-up", worker.started))
                await eventually(lambda: active(router, worker.started, 1))
                report = (await router.client.get("/shadow")).json()
                (scope,) = report["scopes"]
                assert (scope["compared"], scope["agreed"]) == (1, 1)
                assert scope["isl_tokens"] == 51
                assert scope["theirs"]["predicted_cached_tokens"] == 48
                await theirs.ask("mark_prefill_complete", "warm-up")
                await theirs.ask("free", "warm-up")
                await eventually(lambda: active(router, worker.started, 0))


async def chooses(theirs, request_id, worker_id):
    worker, _, _ = await theirs.ask("best_worker", [*PROMPT, 1, 2, 3], request_id)
    return worker == worker_id


async def active(router, worker_id, requests):
    view = await router.view(worker_id)
    return view["ranks"][0]["active_requests"] == requests


async def test_purged_events_are_read_from_the_dump_of_dynamos_router(nats_server, bus, fleet):
    """Dynamo's router purges the stream while only ours reads it."""
    dynamo = fleet("1.0.2")
    async with router_on(nats_server) as early, dynamo.running("worker", "jetstream") as worker:
        rank = (worker.started, 0)
        await worker.ask("stored", PROMPT, [111, 222, 333])
        await worker.ask("stored", [9] * 16, [444], 333)
        await worker.ask("removed", [444])
        await eventually(lambda: finds(early, {rank: 3}))
        async with dynamo.running("router", "jetstream"):
            await eventually(lambda: is_purged(bus))
        await worker.ask("stored", [8] * 16, [555], 333)
        expected, tokens = {rank: 4}, [*PROMPT, *[8] * 16]
        await eventually(lambda: finds(early, expected, tokens=tokens))
        assert (await early.view(worker.started))["ranks"][0]["trust"]["state"] == "lagging"
        async with router_on(nats_server, name="late") as late:
            await eventually(lambda: finds(late, expected, tokens=tokens))
            trust = (await late.view(worker.started))["ranks"][0]["trust"]
            assert trust["reason"] == "engine events lost, and no replay"


async def is_purged(bus):
    return (await bus.js.stream_info(STREAM)).state.first_seq > 1
