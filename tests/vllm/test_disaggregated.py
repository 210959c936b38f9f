"""`kv-router forward` before two real engines, of which one computes prompts and the other answers:
the blocks go through vLLM's own connector, NIXL, in the words that it and the forwarder agree on.
"""

import asyncio
from random import Random

import pytest
from openai import AsyncOpenAI

from support.engines.tiny_llama import WORDS, word, write_tiny_llama
from support.processes.processes import Process, is_ready
from support.processes.servers import eventually, free_port
from support.vllm.vllm_engines import MODEL_NAME, VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
SETTINGS = {"model": MODEL_NAME, "max_tokens": 16, "temperature": 0}
SETTINGS |= {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
PREFILL, DECODE = 1, 2
WARM_TOKENS = 40


@pytest.fixture
async def engines(tmp_path, vllm_python):
    """{PREFILL: an engine, DECODE: another}, which have computed something: where there is AMX, an
    engine whose first step is the one token behind a prompt handed over dies of SIGILL (vLLM 0.32).
    """
    write_tiny_llama(tmp_path / "tiny")
    paths = vllm_python, tmp_path / "tiny", tmp_path
    engines = {i: VllmEngine(*paths, f"w{i}", transfer=NIXL) for i in (PREFILL, DECODE)}
    try:
        for engine in engines.values():
            engine.start()
        for engine in engines.values():
            await asyncio.to_thread(engine.wait)
            await engine.complete(list(WORDS)[:WARM_TOKENS], 1)
        yield engines
    finally:
        for engine in engines.values():
            engine.kill()


@pytest.fixture
async def ai(tmp_path, direct, engines):
    """OpenAI's client of a forwarder before both."""
    for worker_id, role in ((PREFILL, "prefill"), (DECODE, "decode")):
        await direct.attach({worker_id: engines[worker_id]}, role=role)
    port = free_port()
    options = {"router-url": direct.url, "http-port": port, "drain-s": 0}
    process = Process(tmp_path, "forward", "router", "forward", **options)
    url = f"http://127.0.0.1:{port}"
    await eventually(lambda: is_ready(url))
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    process.end()


async def answered(create, **fields):
    """(worker of the prompt, worker of the answer, tokens) of one answer."""
    answer = await create(**SETTINGS, **fields)
    ids = [answer.headers.get(name) for name in ("x-prefill-worker-id", "x-worker-id")]
    return *ids, answer.parse().choices[0].token_ids


async def is_of(engine, source, tokens):
    """Whether `tokens` tokens of prompts came from there."""
    return await engine.metric("vllm:prompt_tokens_by_source_total", f'"{source}"') == tokens


async def is_free(engine):
    """Whether it keeps no blocks for another worker."""
    return await engine.metric("vllm:kv_cache_usage_perc") == 0


async def test_prompts_are_computed_by_one_engine_and_answered_by_the_other(
    ai, engines, record_property
):
    """Of none the second engine computes a token, and it says what the first would have said."""
    prefill, decode = engines[PREFILL], engines[DECODE]
    texts, chats = ai.completions.with_raw_response, ai.chat.completions.with_raw_response
    rng = Random(5)
    prompts = [rng.choices(WORDS, k=length) for length in (20, 320, 1000, 1900)]
    for prompt in prompts:
        *ids, tokens = await answered(texts.create, prompt=prompt)
        assert ids == [str(PREFILL), str(DECODE)]
        assert tokens == (await prefill.complete(prompt, 16)).token_ids
    said = [{"role": "user", "content": " ".join(map(word, prompts[2]))}]
    *ids, tokens = await answered(chats.create, messages=said)
    assert ids == [str(PREFILL), str(DECODE)]
    assert tokens == (await prefill.chat(said, 16)).token_ids
    given = sum(map(len, prompts)) + len(await prefill.tokenize(said))
    await eventually(lambda: is_of(decode, "external_kv_transfer", given))
    assert await is_of(decode, "local_compute", WARM_TOKENS)
    assert await decode.metric("vllm:nixl_num_failed_transfers_total") == 0
    await eventually(lambda: is_free(prefill))
    await eventually(lambda: is_free(decode))
    received = await decode.metric("vllm:nixl_bytes_transferred_sum")
    record_property("measured", f"{given} tokens, {received:.0f} bytes, came through NIXL")

    # No worker computes prompts for others any more: the decode worker computes them.
    prefill.kill()
    *ids, tokens = await answered(texts.create, prompt=[*prompts[1], *prompts[0]])
    assert ids == [None, str(DECODE)]
    assert tokens == (await decode.complete([*prompts[1], *prompts[0]], 16)).token_ids
