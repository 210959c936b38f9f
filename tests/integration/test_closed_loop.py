"""What is wired wrongly is named by the router, in the chain that users run: OpenAI's interface of
`kv-router forward`, the router, and reference engines, each a process of its own.
"""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from router.sequence.hashing.block_hashes import chain, local_block_hashes
from support.engines import miswired_engine
from support.processes.processes import Process, is_ready
from support.processes.servers import eventually, free_port

PROGRAM = Path(miswired_engine.__file__)
REQUESTS = 50
PAUSE_S = 0.03
"""Between requests of a caller: recent load of other requests proves nothing."""

TALKS = 5
WORDS = ("all", "letters", "tell", "little", "of", "bottles,", "and", "still", "offer", "good")
SMALL_HOST = {"num-blocks": 64, "max-model-len": 512, "host-cache-blocks": 512}
IN_ENGINES = {"hash_seed": "nothing"}  # which is the caller's
ENGINES = {
    "nothing": {},
    "block_size": {},
    "salt": {},
    "chat_template": {},
    "tokenizer": {},
    "hash_seed": {},
    "offload": SMALL_HOST,
}


class Caller:
    """Talks to one engine, several talks in turn, each longer than its last time."""

    def __init__(self, fleet, forward_url, model, worker_id):
        self.fleet, self.url = fleet, forward_url
        self.model, self.worker_id = model, worker_id
        self.dice = random.Random(model)
        self.talks = [self.text(40) for _ in range(TALKS)]
        self.client = fleet.client

    def text(self, words):
        return " ".join(self.dice.choice(WORDS) for _ in range(words))

    async def ask(self):
        """One question."""
        talk = self.talks.pop(0)
        self.talks.append(talk)
        prompt = f"{talk} {self.text(self.dice.randint(2, 9))}"
        await (self.ask_by_hashes if self.model == "hash_seed" else self.chat)(prompt)

    async def chat(self, prompt):
        messages = [{"role": "user", "content": prompt}]
        body = {"model": self.model, "messages": messages, "max_tokens": 2}
        answer = await self.client.post(f"{self.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text

    async def ask_by_hashes(self, prompt):
        """As a gateway that hashes blocks by itself, by another seed than routers and engines."""
        tokens = list(prompt.encode())
        blocks = local_block_hashes(np.array(tokens, np.uint32), 16, seed=0)
        hashes = chain(blocks).tolist()
        body = {"model_name": self.model, "sequence_hashes": hashes, "isl_tokens": len(tokens)}
        placed = await self.client.post(f"{self.fleet.url}/select_and_reserve", json=body)
        assert placed.status_code == 200, placed.text
        where = placed.json()
        fields = {"model": self.model}
        answer = await self.fleet.complete(self.worker_id, 0, tokens, 2, **fields)
        gone = f"{self.fleet.url}/reservations/{where['request_id']}"
        await self.client.request("DELETE", gone, json={"usage": answer["usage"]})


@pytest.fixture
async def callers(fleet, tmp_path):
    """Of a fleet in which every model is served by one engine, wired wrongly in one setting."""
    config = tmp_path / "agent.toml"
    config.write_text("onboard_always = true")
    engines = [
        {
            "model-name": model,
            "config": config,
            **options,
            "wired-wrongly": IN_ENGINES.get(model, model),
        }
        for model, options in ENGINES.items()
    ]
    await fleet.start(1, program=PROGRAM, **engines[0])
    for worker_id, options in enumerate(engines[1:], 2):
        fleet.add_worker(worker_id, program=PROGRAM, **options)
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = {"router-url": fleet.url, "http-port": port, "drain-s": 0, "disaggregation": "off"}
    forward = Process(tmp_path, "forward", "router", "forward", **options)
    await fleet.until_ready(len(ENGINES))
    await eventually(lambda: is_ready(url))
    yield [Caller(fleet, url, model, number) for number, model in enumerate(ENGINES, 1)]
    forward.end()


class Named:
    """What the router has named for each model as a whole, the first time it did."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.causes = {}

    async def look(self):
        for found in (await self.fleet.get("/predictions"))["findings"]:
            if (found["worker_id"], found["tenant"]) == (None, None):
                self.causes.setdefault(found["model_name"], found["causes"][0]["name"])
        return self.causes

    async def are(self, models):
        return (await self.look()).keys() >= models


async def test_miswired_engine_is_named_within_50_requests(fleet, callers):
    """And nothing where nothing is: that engine is asked as often."""
    named = Named(fleet)
    wrong = ENGINES.keys() - {"nothing"}

    async def talk(caller):
        for _ in range(REQUESTS):
            await caller.ask()
            await asyncio.sleep(PAUSE_S)
            if caller.model in named.causes:
                return

    watching = asyncio.create_task(eventually(lambda: named.are(wrong), poll_s=0.1))
    try:
        await asyncio.gather(*map(talk, callers))
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    await eventually(lambda: named.are(wrong))
    assert named.causes == {model: model for model in wrong}
