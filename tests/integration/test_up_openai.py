"""OpenAI's own package, unmodified, before `kv-router up`: its clients, and what they raise."""

import asyncio
from functools import partial

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from support.processes.servers import eventually
from support.processes.up_command import SMALL_MODEL, ups

SAID = [{"role": "user", "content": "Once upon a time"}]
CHAT = {"model": "default", "messages": SAID, "max_tokens": 12, "temperature": 0}
TEXT = {"model": "default", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
ENGINES = openai.BadRequestError, openai.UnprocessableEntityError
"""What the engine refuses with, it is passed on as it is."""
LONG = {"max_tokens": 1500, "stream": True}


@pytest.fixture
async def up(monkeypatch):
    for setting, value in SMALL_MODEL.items():
        monkeypatch.setenv(setting, value)
    async with ups() as start:
        up = await start("--no-demo", "--workers", "2")
        await up.until("Ctrl-C stops everything")
        yield up


def options(up):
    url = f"http://127.0.0.1:{up.openai_port}/v1"
    return {"base_url": url, "api_key": "none", "max_retries": 0}


async def booked(up):
    """Requests that the router counts as running."""
    async with httpx.AsyncClient() as client:
        loads = (await client.get(f"http://127.0.0.1:{up.port}/loads")).json()
    return sum(rank["active_requests"] for scope in loads for rank in scope["loads"])


async def until_booked(up, requests):
    async def are_booked():
        return await booked(up) == requests

    await eventually(are_booked)


@pytest.mark.long
async def test_openai_clients_are_served_alike(up):
    await asyncio.to_thread(_with_its_blocking_client, up)
    async with AsyncOpenAI(**options(up)) as ai:
        assert [each.id async for each in ai.models.list()] == ["default"]
        await _answers(ai)
        await _errors(ai)
        await until_booked(up, 0)
        for create, whole in ((ai.chat.completions.create, CHAT), (ai.completions.create, TEXT)):
            await eventually(partial(_hangs_up, up, create, {**whole, **LONG}))


def _with_its_blocking_client(up):
    with OpenAI(**options(up)) as ai:
        assert [each.id for each in ai.models.list()] == ["default"]
        chat = ai.chat.completions.create(**CHAT)
        assert (chat.choices[0].finish_reason, chat.usage.completion_tokens) == ("length", 12)
        parts = ai.completions.create(**TEXT, stream=True)
        text = "".join(part.choices[0].text for part in parts)
        assert text == ai.completions.create(**TEXT).choices[0].text


async def _answers(ai):
    """What is streamed is what is answered at once, and usage comes if it was asked for."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    whole = await ai.chat.completions.create(**CHAT)
    parts = [part async for part in await ai.chat.completions.create(**CHAT, **usage)]
    said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert said == whole.choices[0].message.content
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    whole = await ai.completions.create(**TEXT)
    parts = [part async for part in await ai.completions.create(**TEXT, **usage)]
    said = "".join(part.choices[0].text for part in parts if part.choices)
    assert (said, parts[-1].usage.completion_tokens) == (whole.choices[0].text, 12)


async def _errors(ai):
    """Each is the error of its kind, says what is wrong, and comes before a stream begins."""
    wrong = (
        (openai.NotFoundError, {"model": "another"}, "another"),
        (ENGINES, {"max_tokens": -1}, "max_tokens"),
        (openai.BadRequestError, {"stream": "maybe"}, "stream"),
    )
    for kind, fields, why in wrong:
        for create, whole in ((ai.chat.completions.create, CHAT), (ai.completions.create, TEXT)):
            with pytest.raises(kind, match=why):
                await create(**{**whole, "stream": True, **fields})
    with pytest.raises(openai.BadRequestError, match="messages"):
        await ai.chat.completions.create(**{**CHAT, "messages": [{"role": "user", "content": 5}]})
    with pytest.raises(openai.BadRequestError, match="prompt"):
        await ai.completions.create(**{**TEXT, "prompt": {"not": "text"}})


async def _hangs_up(up, create, whole):
    """Nothing stays behind. Whether that was in the middle of an answer: one that goes on for long
    may have ended, where we are late.
    """
    stream = await create(**whole)
    async for _ in stream:
        break
    is_answered = await booked(up) == 0
    await stream.close()
    await until_booked(up, 0)
    return not is_answered
