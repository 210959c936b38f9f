"""Measures how well a router learns the speed of a real vLLM without an agent, within 5 minutes.

    export VLLM_PYTHON=.vllm-venv/bin/python PYTHONPATH=.:tests
    .venv/bin/python tests/vllm/measure_rates.py

`kv-router serve --workers URL --openai-port` with its defaults; two streams of requests at a time,
half of the prompts continue an earlier one. The truth: what a prompt token costs the same engine
when it is asked one request at a time, by its own time of prompts, less that of a step. Prints the
error of the learned seconds per prompt token after 60 s and after 5 min, as JSON. A quiet machine
is needed: the truth is measured on it.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

import httpx

from support.engines.tiny_llama import WORDS, word, write_tiny_llama
from support.processes.servers import eventually
from support.vllm.vllm_engines import MODEL_NAME, VllmEngine
from support.vllm.vllm_routers import AttachedRouter

LENGTHS = range(200, 1_801, 200)
STREAMS, LOOKS_S, TIMES = 2, (60, 300), 7
OPTIONS = "--num-gpu-blocks-override=200", "--max-num-batched-tokens=256"


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny_llama(directory / "tiny")
        python = os.environ["VLLM_PYTHON"]
        engine = VllmEngine(python, directory / "tiny", directory, "one", options=OPTIONS)
        router = AttachedRouter(directory, [engine])
        try:
            engine.start()
            engine.wait()
            await router.until_up()
            await eventually(lambda: _is_exact(router), 120.0)
            learned = await under_load(router)
            true_s = await truth(engine)
        finally:
            router.close()
            engine.kill()
    found = {seconds: round(per_token_s(rates) / true_s - 1, 4) for seconds, rates in learned}
    result = {"true_prompt_token_us": round(1e6 * true_s, 3), "relative_error": found}
    sys.stdout.write(json.dumps(result) + "\n")


async def _is_exact(router):
    views = await router.call("GET", "/workers")
    return [rank["trust"]["state"] for view in views for rank in view["ranks"]] == ["exact"]


async def under_load(router):
    """Return the learned rates after each time of LOOKS_S, under load from the beginning."""
    found, begun_s = [], time.monotonic()
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream(router, seed)) for seed in range(STREAMS)]
        for seconds in LOOKS_S:
            await asyncio.sleep(begun_s + seconds - time.monotonic())
            asked = {"model_name": MODEL_NAME, "token_ids": [1, 2, 3], "explain": True}
            answer = await router.call("POST", "/select", **asked)
            found.append((seconds, answer["candidates"][0]["predicted"]["rates"]))
        for each in streams:
            each.cancel()
    return found


async def stream(router, seed):
    """Ask for one completion after another."""
    random, said = Random(seed), ""
    async with httpx.AsyncClient(base_url=router.openai_url, timeout=60) as client:
        while True:
            is_followed = random.random() < 0.5 and len(said.split()) < 1_000
            more = " ".join(map(word, random.choices(WORDS, k=random.randint(50, 700))))
            said = f"{said} {more}" if is_followed else more
            body = {"model": MODEL_NAME, "prompt": said, "temperature": 0, "ignore_eos": True,
                    "max_tokens": random.randint(4, 80), "stream": True}  # fmt: skip
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for _ in answer.aiter_raw():
                    pass


async def truth(engine):
    """Return the seconds of a prompt token, attention included, for these lengths on average."""
    random, total_s = Random(7), 0.0
    step_s = await _prefill_s(engine, random, 8)
    for length in LENGTHS:
        total_s += await _prefill_s(engine, random, length) - step_s
    return total_s / sum(LENGTHS)


async def _prefill_s(engine, random, length):
    """Return the median time of a prompt, as the engine measures it."""
    name, found = "vllm:request_prefill_time_seconds_sum", []
    for _ in range(TIMES):
        before_s = await engine.metric(name)
        await engine.complete([random.randint(10, 90) for _ in range(length)], 1)
        found.append(await engine.metric(name) - before_s)
    return median(found)


def per_token_s(rates):
    weighted = sum(
        each * (rates["prompt_token_s"] + rates["prompt_token_context_s"] * each / 2)
        for each in LENGTHS
    )
    return weighted / sum(LENGTHS)


if __name__ == "__main__":
    asyncio.run(main())
