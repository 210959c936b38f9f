"""The examples with httpx and OpenAI's client, against real engines."""

from contextlib import aclosing, asynccontextmanager

import httpx
import pytest
from httpx_transport import RoutedTransport
from openai import AsyncOpenAI, InternalServerError
from plain_httpx import completion, tokens_of

from router.client import RouterClient
from support.fleets.systems import TEXTS, check_cached

pytestmark = pytest.mark.systems

STORY = "Once upon a time. " * 4


@asynccontextmanager
async def events_of(fleet, body):
    async with (
        httpx.AsyncClient(timeout=60) as client,
        aclosing(completion(client, fleet.url, body)) as events,
    ):
        yield events


@pytest.mark.parametrize("worker_id", TEXTS)
async def test_plain_completion_reaches_the_worker_that_holds_its_prompt(fleet, worker_id):
    body = {"model": "default", "prompt": TEXTS[worker_id], "max_tokens": 4}
    async with events_of(fleet, body) as events:
        usages = [event.get("usage") async for event in events]
    check_cached(usages[-1], TEXTS[worker_id])
    await fleet.until_load(0, 0)


async def test_plain_completion_reports_its_first_token_and_its_end(fleet):
    body = {"model": "default", "prompt": STORY, "max_tokens": 512}
    async with events_of(fleet, body) as events:
        await anext(events)
        assert await fleet.load() == (1, 0)
    await fleet.until_load(0, 0)


@asynccontextmanager
async def openai(fleet):
    """OpenAI's client on the transport, whose own URL is the first engine's."""
    engine = fleet.endpoints[1]
    async with httpx.AsyncClient() as plain, RouterClient.over_http(fleet.url) as router:
        transport = RoutedTransport(router, lambda body: tokens_of(plain, engine, body))
        http = httpx.AsyncClient(transport=transport, timeout=60)
        async with AsyncOpenAI(base_url=f"{engine}/v1", api_key="none", http_client=http) as client:
            yield client


@pytest.mark.parametrize("worker_id", TEXTS)
async def test_openai_client_on_the_transport_reaches_the_worker_that_holds_its_prompt(
    fleet, worker_id
):
    async with openai(fleet) as client:
        answer = await client.completions.create(
            model="default", prompt=TEXTS[worker_id], max_tokens=4
        )
        check_cached(answer.usage.model_dump(), TEXTS[worker_id])
        await fleet.until_load(0, 0)


async def test_closed_stream_of_the_transport_ends_its_booking(fleet):
    async with openai(fleet) as client:
        messages = [{"role": "user", "content": STORY}]
        stream = await client.chat.completions.create(
            model="default", messages=messages, max_tokens=512, stream=True
        )
        await anext(stream)
        await fleet.until_load(1, 0)
        await stream.close()
        await fleet.until_load(0, 0)


async def test_refusal_of_the_router_is_the_response(fleet):
    async with openai(fleet) as client:
        for worker_id in TEXTS:
            await fleet.client.patch(
                f"{fleet.url}/workers/{worker_id}", json={"lifecycle": "cordoned"}
            )
        with pytest.raises(InternalServerError) as refused:
            await client.with_options(max_retries=0).completions.create(
                model="default", prompt=STORY, max_tokens=4
            )
        assert refused.value.response.json()["code"] == "no_endpoints"
        models = [model.id async for model in client.models.list()]
        assert models == ["default"]
