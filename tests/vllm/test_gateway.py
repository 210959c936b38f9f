"""Two real vLLMs behind a real Envoy with a picker: prompts return to the engine that has them."""

import asyncio

import httpx
import pytest

from support.fleets.gateways import Envoy
from support.processes.servers import eventually, free_port
from support.vllm.vllm_engines import BLOCK_SIZE, MODEL_NAME, REQUEST_S
from support.vllm.vllm_placing import KNOWN_S
from support.vllm.vllm_routers import AttachedRouter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PROMPTS = 8
PROMPT_TOKENS = 8 * BLOCK_SIZE + 1


@pytest.fixture
async def gateway(tmp_path, engines):
    """Its URL, once the picker's router follows both engines exactly."""
    picker = free_port()
    router = AttachedRouter(tmp_path, engines.values(), **{"epp-port": picker})
    envoy = Envoy(tmp_path, picker, [f"127.0.0.1:{each.port}" for each in engines.values()])

    async def is_exact():
        ranks = [rank for each in (await router.workers()).values() for rank in each["ranks"]]
        return [rank["trust"]["state"] for rank in ranks] == ["exact"] * len(engines)

    try:
        await router.until_up()
        await eventually(is_exact, KNOWN_S)
        async with envoy.running():
            yield envoy.url
    finally:
        router.close()


def fields_of(prompt):
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 2}


async def served_by(engines):
    return [await each.metric("vllm:request_success_total") for each in engines.values()]


async def test_prompts_return_through_envoy_to_the_engine_that_has_them(gateway, engines):
    async with httpx.AsyncClient(base_url=gateway, timeout=REQUEST_S) as client:

        async def cached_tokens(number):
            fields = fields_of([10 + number] * PROMPT_TOKENS)
            answer = await client.post("/v1/completions", json=fields)
            assert answer.status_code == 200, answer.text
            return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)

        probed = await served_by(engines)  # the router proves the sockets that it finds
        # At once: one at a time, all may go to the engine that the router has measured as faster.
        first = await asyncio.gather(*map(cached_tokens, range(PROMPTS)))
        again = [await cached_tokens(number) for number in range(PROMPTS)]
        assert first == [0] * PROMPTS
        # A router that has not learned the engines' rates yet may prefer the idle one once.
        assert again.count(PROMPT_TOKENS - 1) >= PROMPTS - 1, again
        served = [of - probes for of, probes in zip(await served_by(engines), probed, strict=True)]
        assert sum(served) == 2 * PROMPTS
        assert all(served)
        streamed = {**fields_of([7] * 40), "max_tokens": 8, "ignore_eos": True, "stream": True}
        answer = await client.post("/v1/completions", json=streamed)
        assert answer.status_code == 200
        assert answer.text.count("data:") == 8 + 1
