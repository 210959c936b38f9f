"""Engines without an agent, whose metrics the router reads."""

import time
from contextlib import AsyncExitStack

import pytest

from router.ingest.engine_polls import TAKEN_OVER_S, PollDuties
from router.protocol.loads import PolledLoad
from support.engines.metrics_server import MetricsServer, vllm_metrics
from support.fleets.direct import DirectRouter

FIRST, SECOND = 10, 20
"""Two routers."""


def load(source_id, worker_id=1):
    return PolledLoad(worker_id=worker_id, dp_rank=0, source_id=source_id, life_id=1)


def test_every_router_polls_until_another_does():
    duties = PollDuties(SECOND)
    assert duties.is_ours(1, 0.0)
    assert duties.take(load(FIRST), 1.0)
    assert not duties.is_ours(1, 1.0 + TAKEN_OVER_S)
    assert duties.is_ours(1, 1.1 + TAKEN_OVER_S)
    assert duties.is_ours(2, 1.0)


def test_the_lower_id_goes_on():
    duties = PollDuties(FIRST)
    duties.note_read(1, 0.9)
    assert not duties.take(load(SECOND), 1.0)
    assert duties.is_ours(1, 1.0)


def test_a_router_that_cannot_read_an_engine_takes_the_load_of_one_that_can():
    duties = PollDuties(FIRST)
    duties.note_read(1, 0.9)
    assert duties.take(load(SECOND), 1.0 + TAKEN_OVER_S)
    assert not duties.is_ours(1, 1.1 + TAKEN_OVER_S)


def test_its_own_messages_come_back_and_do_not_count():
    duties = PollDuties(FIRST)
    assert not duties.take(load(FIRST), 1.0)
    assert duties.is_ours(1, 1.0)


def test_an_indexer_polls_nothing_and_takes_all():
    assert PollDuties(None).take(load(SECOND), 1.0)


def test_engines_that_are_gone_are_forgotten():
    duties = PollDuties(SECOND)
    duties.take(load(FIRST, 1), 1.0)
    duties.take(load(FIRST, 2), 1.0)
    duties.keep({2})
    assert duties.is_ours(1, 1.0)
    assert not duties.is_ours(2, 1.0)


def registration(server, worker_id=1, **fields):
    return {
        "worker_id": worker_id,
        "endpoint": f"http://127.0.0.1:{server.port}",
        "block_size": 4,
        **fields,
    }


async def until_metric(router, eventually, name, value):
    async def is_equal():
        return await router.metric(name) == value

    await eventually(is_equal)


POLLED = "kv_router_polled_engines"


async def test_metrics_of_an_engine_are_its_load(eventually):
    with MetricsServer(vllm_metrics(running=3, ranks=(0, 1))) as server:
        async with DirectRouter(use_kv_events=False).running() as router:
            body = registration(server, data_parallel_size=2)
            assert (await router.post("/workers", body)).status_code == 201
            for dp_rank, requests in ((0, 3), (1, 4)):
                name = f'kv_router_worker_foreign_requests{{dp_rank="{dp_rank}",worker_id="1"}}'
                await until_metric(router, eventually, name, requests)
            await until_metric(router, eventually, f'{POLLED}{{state="read"}}', 1)
            assert await router.metric('kv_router_engine_polls_total{outcome="read"}') >= 3
            error = await router.metric(
                'kv_router_worker_rate_relative_error{dp_rank="0",worker_id="1"}'
            )
            assert error > 1  # nothing was learned


@pytest.mark.parametrize(
    ("text", "status"),
    [("no metrics", 200), ("", 404), ("x" * (5 << 20), 200), ("vllm:num_requests_running{", 200)],
)
async def test_metrics_that_cannot_be_read_are_counted(eventually, text, status):
    with MetricsServer(text) as server:
        server.status = status
        async with DirectRouter(use_kv_events=False).running() as router:
            await router.post("/workers", registration(server))
            await until_metric(router, eventually, f'{POLLED}{{state="failed"}}', 1)
            assert await router.metric('kv_router_engine_polls_total{outcome="failed"}') >= 1
            server.text, server.status = vllm_metrics(), 200
            await until_metric(router, eventually, f'{POLLED}{{state="read"}}', 1)


async def test_polls_end_with_a_registration_and_can_be_turned_off(eventually):
    with (
        MetricsServer(vllm_metrics()) as unpolled,
        MetricsServer(vllm_metrics()) as server,
        MetricsServer(vllm_metrics()) as other,
    ):
        async with (
            DirectRouter(use_kv_events=False, poll_metrics=False).running() as router_without,
            DirectRouter(use_kv_events=False).running() as router,
        ):
            await router_without.post("/workers", registration(unpolled))
            await router.post("/workers", registration(server))
            await eventually(lambda: server.requests >= 1)
            await router.client.delete("/workers/1")
            await until_metric(router, eventually, f'{POLLED}{{state="read"}}', 0)
            asked = server.requests
            await router.post("/workers", registration(other))
            await eventually(lambda: other.requests >= 2)
            assert (server.requests, unpolled.requests) == (asked, 0)


async def test_one_router_of_a_fleet_polls_an_engine(nats_server, eventually):
    with MetricsServer(vllm_metrics(running=3)) as server:
        async with AsyncExitStack() as stack:
            routers = [
                await stack.enter_async_context(
                    DirectRouter(nats_server.url, use_kv_events=False, name=name).running()
                )
                for name in ("one", "two")
            ]
            for router in routers:
                await router.post("/workers", registration(server))

            async def is_shared():
                states = [await router.metric(f'{POLLED}{{state="shared"}}') for router in routers]
                return sorted(states) == [0, 1]

            await eventually(is_shared)
            asked, since_s = server.requests, time.monotonic()
            await eventually(lambda: server.requests >= asked + 3)
            assert time.monotonic() - since_s > 1.5, "polled by more than one"
            await eventually(is_shared)
            name = 'kv_router_worker_foreign_requests{dp_rank="0",worker_id="1"}'
            for router in routers:
                await until_metric(router, eventually, name, 3)
