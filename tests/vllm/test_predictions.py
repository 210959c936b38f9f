"""300 requests over two real engines: what a router calls exact is what vLLM then reuses."""

import asyncio
from collections import Counter
from random import Random

import httpx
import pytest

from oracle.engine_history import held_sequence_hashes
from support.engines.tiny_llama import WORDS, word
from support.processes.servers import eventually
from support.vllm.vllm_placing import Bench
from support.vllm.vllm_traffic import Ask, Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

REQUESTS = 300
IDLE_RESTART, ROUTER_RESTART, BUSY_RESTART = 100, 160, 220
WITHOUT_IT = 20
"""Requests that are placed on the other engine while one restarts."""

CHAT_TURNS = 8


class Run:
    """The traffic, and what befalls engines and routers meanwhile."""

    def __init__(self, routers, engines):
        self.routers = routers
        self.engines = engines
        self.bench = Bench(routers, engines)
        self.traffic = Traffic(seed=7)
        self._rng = Random(7)

    async def to_the_end(self):
        restarts = {
            IDLE_RESTART: self.restart_idle_engine,
            ROUTER_RESTART: self.restart_routers,
            BUSY_RESTART: self.restart_busy_engine,
        }
        while (placed := len(self.bench.of(self.routers[0]))) < REQUESTS:
            if restart := restarts.pop(placed, None):
                await restart()
            is_free = self._rng.random() < 0.8
            await self.place(self.engines if is_free else {self._rng.choice(list(self.engines))})
        assert not restarts

    async def place(self, among):
        ask = self.traffic.next()
        answer = await self.bench.place(ask, among)
        self.traffic.answered(ask, answer.token_ids)

    async def restart_idle_engine(self):
        self.engines[1].kill()
        await self._start_again(1)

    async def restart_busy_engine(self):
        engine = self.engines[2]
        busy = asyncio.create_task(engine.complete(list(WORDS)[:300], 1500))
        await eventually(lambda: engine.metric("vllm:num_requests_running"))
        engine.kill()
        with pytest.raises(httpx.HTTPError):
            await busy
        await self._start_again(2)

    async def _start_again(self, worker_id):
        """The other engine serves meanwhile; the one that is back holds nothing, as all know."""
        for router in self.routers:
            await router.until_doubted(worker_id)
        self.engines[worker_id].start()
        for _ in range(WITHOUT_IT):
            await self.place(self.engines.keys() - {worker_id})
        await asyncio.to_thread(self.engines[worker_id].wait)
        for router in self.routers:
            await router.until_exactly(worker_id, 0)

    async def restart_routers(self):
        """While the engines are idle: all there is are replays, and what was kept."""
        for router in self.routers:
            await router.restart()
        await self.check_what_is_held()

    async def check_what_is_held(self):
        """The routers' indexes hold what is left of all that the engines ever published."""
        for worker_id, engine in self.engines.items():
            held = held_sequence_hashes(await asyncio.to_thread(engine.history))
            for router in self.routers:
                await router.until_exactly(worker_id, len(held))
                assert (await router.held())[worker_id] == held


async def test_predicted_tokens_are_the_cached_ones(direct, bridged, engines, record_property):
    routers = [direct, bridged]
    for router in routers:
        await router.attach(engines)
    run = Run(routers, engines)
    try:
        await run.to_the_end()
        await run.check_what_is_held()
        record_property("measured", f"events since the restarts: {_events(engines)}")
    finally:
        for line in run.bench.summary():
            record_property("measured", line)
    assert not run.bench.wrong
    for router in routers:
        outcomes = run.bench.of(router)
        assert sum(each.is_exact for each in outcomes) >= 0.95 * REQUESTS
        assert {each.worker_id for each in outcomes if each.cached_tokens} == set(engines)


def _events(engines):
    """How often what happened: proof that there were evictions, and second copies."""
    counts, copies = Counter(), Counter()
    for engine in engines.values():
        for event in engine.history():
            blocks = [(engine.name, each) for each in event["block_hashes"]]
            counts[event["type"]] += len(blocks)
            if event["type"] == "BlockStored":
                counts["second copies"] += sum(copies[each] > 0 for each in blocks)
                copies.update(blocks)
            else:
                copies.subtract(blocks)
    assert counts["BlockRemoved"]
    assert counts["second copies"]
    return dict(counts)


async def test_chats_are_placed_by_what_the_engine_makes_of_them(direct, engines):
    """The template is the engine's: its `/tokenize` returns the prompt that a chat becomes."""
    await direct.attach(engines)
    bench, rng, messages = Bench([direct], engines), Random(1), []
    for _ in range(CHAT_TURNS):
        spoken = " ".join(map(word, rng.choices(WORDS, k=50)))
        messages.append({"role": "user", "content": spoken})
        prompt = await engines[1].tokenize(messages)
        await bench.place(Ask(prompt, "chat", messages=messages))
        messages.append({"role": "assistant", "content": spoken})
    assert not bench.wrong
    assert all(each.is_exact for each in bench.outcomes)
    assert bench.outcomes[-1].cached_tokens > 300
