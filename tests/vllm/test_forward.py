"""`kv-router forward` before real vLLM, with the model's tokenizer: OpenAI's client talks to it,
and what was predicted is what vLLM reuses.
"""

from random import Random

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from support.engines.tiny_llama import WORDS, word, write_tiny_llama
from support.processes.processes import Process
from support.processes.servers import eventually, free_port
from support.vllm.vllm_engines import MODEL_NAME
from support.vllm.vllm_placing import Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

KINDS = ("text", "chat", "parts", "tools", "continued")
TURNS = 8
SETTINGS = {
    "model": MODEL_NAME,
    "max_tokens": 8,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
async def forward(tmp_path, direct, engines):
    """Its URL, once every engine was found to agree with the tokenizer."""
    write_tiny_llama(tmp_path / "tiny")
    await direct.attach(engines)
    port = free_port()
    options = {"router-url": direct.url, "http-port": port, "drain-s": 0}
    options["tokenizer"] = f"{MODEL_NAME}={tmp_path / 'tiny'}"
    process = Process(tmp_path, "forward", "router", "forward", **options)
    url = f"http://127.0.0.1:{port}"
    try:
        for kind in KINDS:
            await eventually(lambda kind=kind: agrees(url, kind, len(engines)))
        yield url
    finally:
        process.end()


async def metric(url, line):
    try:
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{url}/metrics")).text
    except httpx.HTTPError:
        return None
    found = [each for each in text.splitlines() if each.startswith(f"{line} ")]
    return float(found[0].split()[-1]) if found else None


async def agrees(url, kind, workers):
    name = "kv_router_forward_tokenizer_workers"
    labels = f'{{kind="{kind}",model="{MODEL_NAME}",outcome="agrees"}}'
    return await metric(url, name + labels) == workers


async def streamed(create, **fields):
    """(tokens predicted to be cached, cached, characters) of one answer, as it streams."""
    answer = await create(**SETTINGS, **STREAM, **fields)
    predicted, text, usage = int(answer.headers["x-predicted-cached-tokens"]), "", None
    async for part in answer.parse():
        for choice in part.choices:
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
        usage = part.usage or usage
    details = usage.prompt_tokens_details
    return predicted, (details.cached_tokens or 0) if details else 0, text


async def test_predicted_tokens_are_reused(forward, direct, engines):
    rng, bench, found = Random(3), Bench([direct], engines), []
    async with AsyncOpenAI(base_url=f"{forward}/v1", api_key="none", max_retries=0) as ai:
        chats = ai.chat.completions.with_raw_response.create
        messages = []
        for _ in range(TURNS):
            said = " ".join(map(word, rng.choices(WORDS, k=50)))
            messages.append({"role": "user", "content": said})
            await bench.settle()
            predicted, cached, text = await streamed(chats, messages=messages)
            messages.append({"role": "assistant", "content": text})
            found.append((predicted, cached))
        texts = ai.completions.with_raw_response.create
        prompt = " ".join(map(word, rng.choices(WORDS, k=150)))
        for _ in range(2):
            await bench.settle()
            predicted, cached, text = await streamed(texts, prompt=prompt)
            assert text
            found.append((predicted, cached))
        assert [predicted for predicted, _ in found] == [cached for _, cached in found]
        assert found[TURNS - 1][1] > 300
        assert found[-1][1] > 64
        with pytest.raises(BadRequestError):
            await ai.chat.completions.create(messages=[{"role": "user", "content": 5}], **SETTINGS)
    name = "kv_router_forward_tokenizations_total"
    assert await metric(forward, f'{name}{{outcome="local"}}') == len(found)
    assert await metric(forward, f'{name}{{outcome="asked"}}') is None
    assert await metric(forward, f'{name}{{outcome="disagreed"}}') is None
