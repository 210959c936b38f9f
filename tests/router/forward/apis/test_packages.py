"""OpenAI's and Anthropic's packages, unmodified: the same script directly and through here."""

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from support.engines.agent_engine import AgentEngine
from support.fleets.agent_scenes import BODIES, agent_scene

TOOL = BODIES["/v1/messages"]["tools"][0]
HELLO = [{"role": "user", "content": "Hello"}]


async def of_openai(url):
    """What its clients see of chats and Responses."""
    seen = []
    options = {"base_url": f"{url}/v1", "api_key": "key", "max_retries": 0}
    async with AsyncOpenAI(**options) as ai:
        chat = await ai.chat.completions.create(model="m", messages=HELLO, max_tokens=6)
        seen += [chat.choices[0].message.content, chat.usage]
        given = {"model": "m", "input": "Hello", "max_output_tokens": 6}
        whole = await ai.responses.create(**given, tools=BODIES["/v1/responses"]["tools"])
        seen += [whole.output_text, whole.usage, whole.id]
        async for event in await ai.responses.create(**given, stream=True):
            seen.append(event)
        seen.append((await ai.responses.retrieve(whole.id)).output_text)
        seen.append((await ai.responses.cancel(whole.id)).status)
        more = await ai.responses.create(**given, previous_response_id=whole.id)
        seen += [more.id, more.usage.input_tokens]
        with pytest.raises(openai.NotFoundError) as caught:
            await ai.responses.create(**given, previous_response_id="resp_x")
        seen.append(caught.value.body)
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.responses.create(**given, tools=[{"type": "web_search"}])
        seen.append(caught.value.body)
    return seen


async def of_anthropic(url):
    """What its clients see of Messages."""
    seen = []
    options = {"base_url": url, "api_key": "key", "max_retries": 0}
    given = {"model": "m", "messages": HELLO, "max_tokens": 6}
    async with AsyncAnthropic(**options) as ai:
        whole = await ai.messages.create(**given, system="Be brief.", tools=[TOOL])
        seen += [whole.content, whole.usage, whole.stop_reason]
        beta = await ai.beta.messages.create(**given, betas=["x"])
        seen += [beta.content, beta.usage]
        async with ai.messages.stream(**given) as stream:
            seen += [event async for event in stream]
            final = await stream.get_final_message()
        seen += [final.content, final.usage]
        count = await ai.messages.count_tokens(model="m", messages=HELLO, system="Be brief.")
        seen.append(count.input_tokens)
        part = {"type": "document", "source": {"type": "url", "url": "x"}}
        wrong = {**given, "messages": [{"role": "user", "content": [part]}]}
        with pytest.raises(anthropic.BadRequestError, match="document"):
            await ai.messages.create(**wrong)
    return seen


@pytest.mark.parametrize("script", [of_openai, of_anthropic])
async def test_package_sees_the_same_directly_and_through_the_router(nats_server, script):
    engine = AgentEngine(stores=True, key="key")
    async with agent_scene(nats_server.url, engine) as its:
        directly = await script(engine.url)
        engine.forget()
        assert await script(its.forward.url) == directly
        assert len(directly) > 10
        await its.until_free()


async def test_anthropics_client_raises_the_errors_of_its_kind(nats_server):
    async with agent_scene(nats_server.url, AgentEngine()) as its:
        options = {"base_url": its.forward.url, "api_key": "key", "max_retries": 0}
        async with AsyncAnthropic(**options) as ai:
            with pytest.raises(anthropic.NotFoundError, match="not served"):
                await ai.messages.create(model="x", messages=HELLO, max_tokens=1)
            with pytest.raises(anthropic.BadRequestError, match="messages"):
                await ai.messages.create(model="m", messages=[], max_tokens=1)
