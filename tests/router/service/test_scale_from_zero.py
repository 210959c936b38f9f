"""Requests sent to a router before its first worker is there, as users send them."""

import asyncio
import json

import pytest

from router.client import ClientSettings, RouterClient
from router.protocol.requests import SelectRequest
from router.runtime.bus.connection import connection
from router.scheduler.errors import NoEndpointsError
from support.engines.upstreams import STREAM_END, STREAM_HEAD, Upstream, event, says
from support.fleets.forwarding import COMPLETION, Scene, lines
from support.processes.running import RunningRouter
from support.processes.servers import eventually

PROMPT = list(range(40))
BOOK = "/select_and_reserve"
WAITING = 'kv_router_pool_%s{model_name="default",role="aggregated",routing_group="default"}'
FROM_ZERO = {"no_worker_wait_s": 30.0, "scale_from_zero_models": "default, tiny"}


IMPATIENT = ClientSettings(timeout_s=0.5)
"""Longer waits must be announced to it."""


@pytest.fixture
async def router(nats_server, request):
    fields = FROM_ZERO | getattr(request, "param", {})
    async with RunningRouter(nats_server.url, **fields).running() as router:
        yield router


async def is_ready(router):
    return (await router.client.get("/ready")).status_code == 200


async def until_waiting(router, count):
    async def waits():
        return await router.metric(WAITING % "waiting_for_worker") == count

    await eventually(waits)


async def test_requests_over_http_nats_and_the_client_wait_for_the_first_worker(
    router, nats_server
):
    await eventually(lambda: is_ready(router))
    body = {"token_ids": PROMPT, "request_id": "http"}
    over_http = asyncio.create_task(router.post(BOOK, body))
    async with (
        RouterClient.over_nats(nats_server.url, "test", settings=IMPATIENT) as client,
        connection(nats_server.url, "test", lambda _: None) as bus,
    ):
        asked = SelectRequest(token_ids=PROMPT, request_id="client")
        by_client = asyncio.create_task(client.select_and_reserve(asked))
        command = {"method": "new", "tokens": PROMPT, "request_id": "nats"}
        sent = json.dumps(command).encode()
        over_nats = asyncio.create_task(bus.client.request("kv.test.router", sent, timeout=20.0))
        await until_waiting(router, 3)
        assert await router.metric(WAITING % "workers_needed") == 1
        await asyncio.sleep(0.6)  # longer than the client waits for an answer
        await router.worker(1)
        decision = (await over_http).json()
        assert (decision["worker_id"], decision["waited_s"] > 0.5) == (1, True)
        assert (await by_client).worker_id == 1
        assert json.loads((await over_nats).data)["worker_id"] == 1
    await until_waiting(router, 0)


@pytest.mark.parametrize("router", [{"no_worker_wait_s": 1.5}], indirect=True)
async def test_without_a_worker_the_wait_ends_with_503_and_retry_after(router):
    answer = await router.post(BOOK, {"token_ids": PROMPT, "request_id": "a"})
    assert (answer.status_code, answer.json()["code"]) == (503, "no_endpoints")
    assert answer.headers["retry-after"] == "2"
    unknown = {"token_ids": PROMPT, "request_id": "b", "model_name": "stranger"}
    answer = await router.post(BOOK, unknown)
    assert (answer.status_code, "retry-after" in answer.headers) == (503, False)
    metrics = (await router.client.get("/metrics")).text
    assert "stranger" not in metrics


async def test_client_that_disconnects_leaves_the_queue(router):
    body = {"token_ids": PROMPT, "request_id": "a"}
    waiting = asyncio.create_task(router.post(BOOK, body))
    await until_waiting(router, 1)
    waiting.cancel()
    await until_waiting(router, 0)


async def test_streamed_completion_waits_and_is_served(nats_server):
    piece = event({"id": "i", "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})
    answers = says(STREAM_HEAD + piece + event(b"[DONE]") + STREAM_END)
    async with Scene.in_router(nats_server.url, {}, router_fields=FROM_ZERO) as its:
        asked = {**COMPLETION, "stream": True}
        task = asyncio.create_task(its.forward.complete(**asked))
        waiting = its.router.service.host.core.waiting
        await eventually(lambda: len(waiting) == 1)
        async with Upstream(answers).running() as engine:
            await its.router.worker(1, endpoint=engine.url)
            assert lines((await task).text)[-1] == "[DONE]"
            await its.until_free()


async def test_not_waiting_is_the_default(nats_server):
    async with RunningRouter(nats_server.url).running() as router:
        async with RouterClient.over_http(str(router.client.base_url)) as client:
            with pytest.raises(NoEndpointsError):
                await client.select_and_reserve(SelectRequest(token_ids=PROMPT))
        assert (await router.client.get("/ready")).status_code == 503
