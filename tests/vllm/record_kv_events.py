"""Writes the captures of the conformance kit: KV events of a real vLLM, and what it then reuses.

    export VLLM_PYTHON=.vllm-venv/bin/python PYTHONPATH=.:tests
    .venv/bin/python tests/vllm/record_kv_events.py

A server on the CPU gets requests one after the other. Recorded are, for each of them, the tokens
that the server says it reused, and then the batches that it published, as its replay socket returns
them. `router/tools/conformance/corpus/captures.py` plays them.
"""

import asyncio
import datetime
import json
import os
import tempfile
from pathlib import Path
from random import Random

import httpx
import zmq

from support.engines.tiny_llama import WORDS, write_tiny_llama
from support.vllm.vllm_engines import BLOCK_SIZE, VllmEngine

TARGET = Path(__file__).parents[2] / "router/tools/conformance/corpus/captures_vllm.json"
REST = 7
"""Tokens behind the whole blocks of a prompt: vLLM never reuses all of a prompt."""
QUIET_S = 1.0
HOW = (
    "a server on the CPU with a model of 0.4 million parameters, 80 blocks of 32 tokens and steps "
    "of at most 512 tokens; batches as its replay socket returned them, cached tokens as its API "
    "reported them"
)


class Recorder:
    """One engine, and what happened since `begin`."""

    def __init__(self, engine):
        self.engine = engine
        self._rng = Random(5)
        self._seen = 0
        self._steps = []

    def text(self, blocks):
        return self._rng.choices(WORDS, k=blocks * BLOCK_SIZE + REST)

    async def begin(self):
        """Empty the cache; batches before that are not recorded."""
        async with httpx.AsyncClient(base_url=self.engine.url, timeout=60) as client:
            (await client.post("/reset_prefix_cache")).raise_for_status()
        await self.engine.complete(self.text(0), 1)  # events leave with the next step
        self._seen += len(await self._published())
        self._steps = []

    async def ask(self, token_ids, max_tokens=8, copies=1, **options):
        """Send a prompt, `copies` times at once, and record what its events were."""
        asked = [self.engine.complete(token_ids, max_tokens, **options) for _ in range(copies)]
        answers = await asyncio.gather(*asked)
        batches = await self._published()
        self._seen += len(batches)
        reused = answers[0].cached_tokens if copies == 1 else None  # one finds another's blocks
        step = {"token_ids": token_ids, "cached_tokens": reused}
        if options.get("cache_salt"):
            step["cache_salt"] = options["cache_salt"]
        self._steps.append(step | {"batches": [batch.hex() for batch in batches]})
        return answers[0].token_ids

    def run(self, name, **facts):
        """Return what was recorded since `begin`."""
        return {"name": name, **facts, "steps": self._steps}

    async def _published(self):
        """Return the batches since the last call, once no more come."""
        batches, before = [], None
        while before != len(batches):
            before = len(batches)
            await asyncio.sleep(QUIET_S)
            batches = await asyncio.to_thread(self._replayed, self._seen)
        return batches

    def _replayed(self, first):
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.engine.replay)
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            payloads = []
            while True:
                assert socket.poll(10_000), "no replay"
                payload = socket.recv_multipart()[-1]
                if not payload:
                    return payloads
                payloads.append(payload)


async def conversations(recorder):
    await recorder.begin()
    system = recorder.text(4)[: 4 * BLOCK_SIZE]
    first, second = system + recorder.text(3), system + recorder.text(2)
    answer = await recorder.ask(first, 40)
    await recorder.ask(second, 8)
    turn = first + answer + recorder.text(2)
    await recorder.ask(turn, 40)
    for prompt in (first, turn, second, system + recorder.text(1)):
        await recorder.ask(prompt, 1)
    return recorder.run("conversations with one system prompt")


async def salts(recorder):
    await recorder.begin()
    prompt = recorder.text(6)
    for salt in ("tenant-a", None, "tenant-b", "tenant-a", None, "tenant-b"):
        await recorder.ask(prompt, 1, cache_salt=salt)
    return recorder.run("one prompt with two salts and without")


async def long_salted(recorder):
    """Prompts that the scheduler cuts into several steps: only the first event has the salt."""
    await recorder.begin()
    prompt = recorder.text(60)
    await recorder.ask(prompt, 1, cache_salt="tenant-a")
    await recorder.ask(prompt, 1, cache_salt="tenant-a")
    await recorder.ask(prompt, 1)
    return recorder.run("a prompt of 60 blocks with a salt")


async def evictions(recorder):
    await recorder.begin()
    prompts = [recorder.text(15) for _ in range(7)]
    for prompt in prompts:
        await recorder.ask(prompt, 1)
    for prompt in reversed(prompts):
        await recorder.ask(prompt, 1)
    return recorder.run("more prompts than the cache holds")


async def copies(recorder):
    await recorder.begin()
    prompt = recorder.text(4)
    answer = await recorder.ask(prompt, 3 * BLOCK_SIZE, copies=4)
    whole = prompt + answer
    for blocks in (18, 18, 18, 8, 6):
        await recorder.ask(recorder.text(blocks), 1)
    await recorder.ask(whole + recorder.text(0), 1)
    return recorder.run("four equal requests at once, then others until blocks are evicted")


async def resets(recorder):
    await recorder.begin()
    prompt, other = recorder.text(5), recorder.text(3)
    await recorder.ask(prompt, 1)
    await recorder.ask(prompt, 1)
    async with httpx.AsyncClient(base_url=recorder.engine.url, timeout=60) as client:
        (await client.post("/reset_prefix_cache")).raise_for_status()
    await recorder.ask(other, 1)
    await recorder.ask(prompt, 1)
    await recorder.ask(other, 1)
    return recorder.run("the prefix cache reset between requests")


async def full_reports(recorder):
    await recorder.begin()
    prompt = recorder.text(10)
    for _ in range(3):
        await recorder.ask(prompt, 1, kv_cache_report_mode="full")
    for _ in range(5):
        await recorder.ask(recorder.text(15), 1)
    await recorder.ask(prompt, 1)
    return recorder.run(
        "kv_cache_report_mode full, then others until blocks are evicted", reannounces=True
    )


async def recorded(engine, *scripts):
    engine.start()
    try:
        await asyncio.to_thread(engine.wait)
        recorder = Recorder(engine)
        runs = [await script(recorder) for script in scripts]
        async with httpx.AsyncClient(base_url=engine.url) as client:
            version = (await client.get("/version")).json()["version"]
        return version, runs
    finally:
        engine.kill()


async def main():
    python = os.environ["VLLM_PYTHON"]
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny_llama(directory / "tiny")
        paths = python, directory / "tiny", directory
        scripts = (conversations, salts, long_salted, evictions, copies, resets, full_reports)
        options = ("--max-num-batched-tokens=512",)
        version, runs = await recorded(VllmEngine(*paths, "ints", options=options), *scripts)
        wide = VllmEngine(*paths, "wide", int_hashes=False, options=options)
        _, more = await recorded(wide, evictions)
        runs += [run | {"name": f"{run['name']}; 32-byte hashes"} for run in more]
    found = {
        "engine": f"vLLM {version}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "how": HOW,
        "block_size": BLOCK_SIZE,
        "runs": runs,
    }
    TARGET.write_text(
        json.dumps(found).replace('{"name"', '\n{"name"').replace('{"token_ids"', '\n{"token_ids"')
        + "\n"
    )


if __name__ == "__main__":
    asyncio.run(main())
