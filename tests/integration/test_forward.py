"""`kv-router forward` before a router and engines that are processes, driven by OpenAI's client."""

from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from support.engines import held_engine
from support.processes.processes import Process, is_ready
from support.processes.servers import eventually, free_port

LONG = "Once upon a time, in a far country, " * 40
"""So that it is worth more than what a busy machine makes one engine look slower than the other."""

TALK = [{"role": "user", "content": "Tell me of a key-value cache, and of what prefixes are for. "}]


@pytest.fixture
async def forward(fleet, tmp_path):
    started = []

    async def start(**options):
        port = free_port()
        options = {"router-url": fleet.url, "http-port": port, "drain-s": 0, **options}
        started.append(Process(tmp_path, "forward", "router", "forward", **options))
        url = f"http://127.0.0.1:{port}"
        await eventually(lambda: is_ready(url))
        return url

    yield start
    for each in started:
        each.end()


async def is_free(fleet):
    loads = await fleet.get("/loads")
    return not any(rank["active_requests"] for scope in loads for rank in scope["loads"])


async def reported(fleet):
    """Unpublished blocks cannot be found, and a worker that seems busy is avoided."""
    await fleet.until_drained()
    await eventually(lambda: is_free(fleet))


def cached(usage):
    return usage.prompt_tokens_details.cached_tokens


async def test_openais_own_client_chats_completes_and_streams(fleet, forward):
    await fleet.start(workers=2)
    url = await forward()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai:
        assert [model.id async for model in ai.models.list()] == ["default"]
        settings = {"model": "default", "max_tokens": 20}
        prompt = LONG
        first = await ai.completions.create(prompt=prompt, **settings)
        await reported(fleet)
        again = await ai.completions.create(prompt=prompt, **settings)
        assert again.choices[0].text == first.choices[0].text
        assert (cached(first.usage), cached(again.usage) > 1400) == (0, True)
        chunks = await ai.completions.create(prompt=list(prompt.encode()), stream=True, **settings)
        streamed = "".join([chunk.choices[0].text async for chunk in chunks])
        assert streamed == first.choices[0].text

        long_talk = [{"role": "user", "content": LONG}]
        chat = await ai.chat.completions.create(messages=long_talk, **settings)
        assert chat.choices[0].message.role == "assistant"
        await reported(fleet)
        said = [*long_talk, {"role": "assistant", "content": "Well."}, *TALK]
        stream = await ai.chat.completions.create(
            messages=said, stream=True, stream_options={"include_usage": True}, **settings
        )
        parts = [part async for part in stream]
        assert sum(bool(part.choices) for part in parts) == 20
        assert cached(parts[-1].usage) > 1400  # of the turn before, wherever that was served
        with pytest.raises(NotFoundError):
            await ai.embeddings.create(model="default", input="x")
    await eventually(lambda: is_free(fleet))


async def test_a_worker_that_dies_is_passed_over(fleet, forward):
    await fleet.start(workers=2)
    url = await forward()
    fleet.workers[1].kill()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai:
        for number in range(8):
            answer = await ai.completions.create(
                model="default", prompt=f"{number} bottles", max_tokens=2
            )
            assert answer.usage.completion_tokens == 2
    await eventually(lambda: is_free(fleet))


async def test_stream_of_a_killed_worker_is_migrated(fleet, forward, tmp_path):
    """Greedy: the second worker writes what the first would have written."""
    hold = tmp_path / "hold"
    program = Path(held_engine.__file__)
    await fleet.start(workers=2, program=program, **{"held-by": hold})
    url = await forward()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai:
        settings = {"model": "default", "messages": TALK, "max_tokens": 400, "stream": True}
        said = [
            part.choices[0].delta.content
            async for part in await ai.chat.completions.create(**settings)
        ]
        hold.touch()
        parts = await ai.chat.completions.with_raw_response.create(**settings)
        worker_id, again = int(parts.headers["x-worker-id"]), []
        async for part in parts.parse():
            again.append(part.choices[0].delta.content)
            if len(again) == 3:
                fleet.workers[worker_id].kill()
                hold.unlink()
        assert len(again) == len(said) == 400
        # A character may be cut in two between them: bytes that are no text by themselves.
        differing = sum(one != other for one, other in zip(said, again, strict=True))
        assert differing <= 3
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"{url}/metrics")).text
    assert 'kv_router_forward_migrations_total{outcome="moved"} 1.0' in metrics
    await eventually(lambda: is_free(fleet))
