"""`kv-router serve --workers … --openai-port` before real vLLMs: one with two ranks and KV events,
one without events. Agents' conversations, by every API, are predicted as vLLM counts them.
"""

import time
from collections import Counter
from contextlib import asynccontextmanager
from random import Random

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from support.engines.tiny_llama import WORDS, word, write_tiny_llama
from support.processes.servers import eventually
from support.vllm.vllm_engines import BLOCK_SIZE, MODEL_NAME, VllmEngine
from support.vllm.vllm_placing import MARGIN_S
from support.vllm.vllm_routers import AttachedRouter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

BLOCKS = 200
CONVERSATIONS = 100
TURNS = 3
UP_S = 300.0
TOOL = {
    "name": "t77",
    "description": "t78 t79",
    "parameters": {"type": "object", "properties": {"t81": {"type": "string"}}},
}
USAGES = {
    "/v1/completions": lambda usage: usage["prompt_tokens_details"]["cached_tokens"],
    "/v1/chat/completions": lambda usage: usage["prompt_tokens_details"]["cached_tokens"],
    "/v1/responses": lambda usage: usage["input_tokens_details"]["cached_tokens"],
    "/v1/messages": lambda usage: usage["cache_read_input_tokens"],
}


@pytest.fixture(scope="module")
def attachable(tmp_path_factory, vllm_python):
    """An engine with two ranks and events, one without events, and one with one rank."""
    directory = tmp_path_factory.mktemp("attach")
    write_tiny_llama(directory / "tiny")
    paths = vllm_python, directory / "tiny", directory
    tools = "--enable-auto-tool-choice", "--tool-call-parser=hermes"
    options = (f"--num-gpu-blocks-override={BLOCKS}", *tools)
    engines = (
        VllmEngine(*paths, "ranks", options=("--data-parallel-size=2", *options)),
        VllmEngine(*paths, "plain", options=options, has_events=False),
        VllmEngine(*paths, "single", options=options),
    )
    try:
        for engine in engines:
            engine.start()
        yield engines, directory / "tiny"
    finally:
        for engine in engines:
            engine.kill()


@pytest.fixture(scope="module")
def router(tmp_path_factory, attachable):
    """It is started before its engines serve."""
    engines, model = attachable
    tokenizer = f"{MODEL_NAME}={model}"
    router = AttachedRouter(tmp_path_factory.mktemp("router"), engines, tokenizer=tokenizer)
    yield router
    router.close()


async def states(router):
    """The trust in each rank, by URL."""
    views = await router.workers()
    return {url: [rank["trust"]["state"] for rank in view["ranks"]] for url, view in views.items()}


async def until_attached(router, engines):
    async def is_attached():
        expected = (["exact", "exact"], ["approximate"], ["exact"])
        return await states(router) == {
            engine.url: trusts for engine, trusts in zip(engines, expected, strict=True)
        }

    await router.until_up()
    await eventually(is_attached, UP_S)


async def test_engines_are_attached_and_described(router, attachable):
    engines, _ = attachable
    await until_attached(router, engines)
    views = await router.workers()
    ranks, plain, _ = (views[engine.url] for engine in engines)
    assert (ranks["total_kv_blocks"], ranks["block_size"]) == (BLOCKS, BLOCK_SIZE)
    assert ranks["data_parallel_size"] == 2
    assert f"tiny, 2 ranks of {BLOCKS} blocks of {BLOCK_SIZE} tokens" in ranks["attachment"]
    assert "events with replay" in ranks["attachment"]
    assert "no KV events" in plain["attachment"]
    async with httpx.AsyncClient(base_url=router.openai_url) as client:
        models = (await client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == [MODEL_NAME]


class Conversations:
    """Conversations by one API; `found`: whether each exact prediction was right."""

    def __init__(self, router, client, path, seed):
        self._router, self._client, self._path = router, client, path
        self._rng = Random(seed)
        self._systems = [self._words(60) for _ in range(12)]
        self.found = Counter()
        self.wrong = []
        self.cached_tokens = 0

    def _words(self, count):
        return " ".join(map(word, self._rng.choices(WORDS, k=count)))

    async def run(self, conversations, turns):
        for number in range(conversations):
            await self._converse(self._rng.choice(self._systems), turns, number % 2 == 0)

    async def _converse(self, system, turns, has_tools):
        said = []
        for _ in range(turns):
            said.append(("user", self._words(self._rng.randint(20, 50))))
            text = await self._ask(self._body(system, said, has_tools))
            said.append(("assistant", text))

    def _body(self, system, said, has_tools):
        turns = [{"role": role, "content": text} for role, text in said]
        body = {"model": MODEL_NAME, "temperature": 0}
        if self._path == "/v1/completions":
            prompt = " ".join([system, *(text for _, text in said)])
            return {**body, "prompt": prompt, "max_tokens": 8}
        if self._path == "/v1/responses":
            tools = [{"type": "function", **TOOL}] if has_tools else []
            return {**body, "instructions": system, "input": turns, "tools": tools,
                    "max_output_tokens": 8, "store": False}  # fmt: skip
        if self._path == "/v1/messages":
            tool = {key: value for key, value in TOOL.items() if key != "parameters"}
            tools = [{**tool, "input_schema": TOOL["parameters"]}] if has_tools else []
            return {**body, "system": system, "messages": turns, "max_tokens": 8,
                    **({"tools": tools} if tools else {})}  # fmt: skip
        tools = {"tools": [{"type": "function", "function": TOOL}]} if has_tools else {}
        system_turn = {"role": "system", "content": system}
        return {**body, "messages": [system_turn, *turns], "max_tokens": 8, **tools}

    async def _ask(self, body):
        before = await self._exact_ranks()
        answer = await self._client.post(self._path, json=body)
        answered_s = time.monotonic()
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        cached = USAGES[self._path](reply["usage"]) or 0
        self.cached_tokens += cached
        self._compare(answer.headers, before, cached)
        await eventually(lambda: self._has_settled(answered_s))
        return _text(reply)

    def _compare(self, headers, exact_ranks, cached):
        if "x-data-parallel-rank" not in headers:
            assert self._path == "/v1/responses"  # vLLM chooses the rank of these requests itself
            return
        rank = int(headers["x-worker-id"]), int(headers["x-data-parallel-rank"])
        predicted = int(headers["x-predicted-cached-tokens"])
        if rank in exact_ranks:
            self.found[predicted == cached] += 1
            if predicted != cached:
                self.wrong.append((predicted, cached))

    async def _exact_ranks(self):
        views = await self._router.call("GET", "/workers")
        return {
            (view["worker_id"], rank["dp_rank"])
            for view in views
            for rank in view["ranks"]
            if rank["trust"]["state"] == "exact"
        }

    async def _has_settled(self, answered_s):
        """Return whether every rank with events was followed up to a time after the answer."""
        asked_s = time.monotonic()
        views = await self._router.call("GET", "/workers")
        trusts = [rank["trust"] for view in views for rank in view["ranks"]]
        return all(
            trust["state"] == "approximate"
            or (trust["age_s"] is not None and asked_s - trust["age_s"] > answered_s + MARGIN_S)
            for trust in trusts
        )


def _text(reply):
    if "choices" in reply:
        choice = reply["choices"][0]
        return (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
    parts = reply.get("content") or [
        part for item in reply["output"] for part in item.get("content") or ()
    ]
    return "".join(part.get("text") or "" for part in parts)


@asynccontextmanager
async def cordoned(router, engine):
    """Keep new requests from an engine for a while."""
    worker_id = (await router.workers())[engine.url]["worker_id"]
    await router.call("PATCH", f"/workers/{worker_id}", lifecycle="cordoned")
    try:
        yield
    finally:
        await router.call("PATCH", f"/workers/{worker_id}", lifecycle="schedulable")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_conversations_are_predicted_as_vllm_counts_them(router, attachable, path):
    await converse(router, attachable[0], path)


async def test_responses_are_predicted_as_vllm_counts_them(router, attachable):
    """vLLM itself chooses the rank of a Responses request, so of two ranks nothing is predicted."""
    await until_attached(router, attachable[0])
    async with cordoned(router, attachable[0][0]):
        await converse(router, attachable[0], "/v1/responses")


async def converse(router, engines, path):
    """Hold conversations, and assert that every exact prediction is what the engine reports."""
    await until_attached(router, engines)
    async with httpx.AsyncClient(base_url=router.openai_url, timeout=60) as client:
        talk = Conversations(router, client, path, seed=len(path))
        await talk.run(CONVERSATIONS, TURNS)
    assert talk.wrong == []
    assert talk.found[True] > CONVERSATIONS * TURNS / 5
    assert talk.cached_tokens > 0


SAID = [{"role": "user", "content": "t5 t6 t7"}]
GIVEN = {"model": MODEL_NAME, "temperature": 0}


async def of_openai(url):
    """What OpenAI's client sees of chats, completions and Responses, whole and streamed."""
    seen = []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as ai:
        seen.append([model.id async for model in ai.models.list()])
        chat = {**GIVEN, "messages": SAID, "max_tokens": 8}
        whole = await ai.chat.completions.create(**chat)
        seen += [whole.choices[0].message.content, whole.usage.prompt_tokens]
        stream = await ai.chat.completions.create(**chat, stream=True)
        parts = [part.choices[0].delta.content async for part in stream if part.choices]
        seen.append("".join(filter(None, parts)))
        text = await ai.completions.create(**GIVEN, prompt="t5 t6 t7", max_tokens=8)
        seen += [text.choices[0].text, text.usage.total_tokens]
        given = {**GIVEN, "input": SAID, "instructions": "t9 t10", "max_output_tokens": 8}
        response = await ai.responses.create(**given)
        seen += [response.output_text, response.usage.input_tokens, response.status]
        stream = await ai.responses.create(**given, stream=True)
        events = [event async for event in stream]
        seen.append(list(dict.fromkeys(event.type for event in events)))  # tokens come in groups
        seen.append("".join(each.delta for each in events if each.type.endswith("text.delta")))
    return seen


async def of_anthropic(url):
    """What Anthropic's client sees of Messages, whole and streamed."""
    seen, given = [], {"model": MODEL_NAME, "messages": SAID, "max_tokens": 8, "system": "t9 t10"}
    async with AsyncAnthropic(base_url=url, api_key="key", max_retries=0) as ai:
        whole = await ai.messages.create(**given, extra_body={"temperature": 0})
        seen += [whole.content, whole.stop_reason, whole.usage.output_tokens]
        async with ai.messages.stream(**given, extra_body={"temperature": 0}) as stream:
            seen.append("".join([text async for text in stream.text_stream]))
        given.pop("max_tokens")
        seen.append((await ai.messages.count_tokens(**given)).input_tokens)
    return seen


@pytest.mark.parametrize("script", [of_openai, of_anthropic])
async def test_package_sees_the_same_directly_and_through_the_router(router, attachable, script):
    engines, _ = attachable
    await until_attached(router, engines)
    directly = await script(engines[1].url)
    assert await script(router.openai_url) == directly
