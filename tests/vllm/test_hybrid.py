"""300 requests over two engines of a hybrid model, which evict: what is called exact is right."""

import asyncio
from random import Random

import pytest

from support.engines.tiny_hybrids import CHUNK_TOKENS, MODELS, write_tiny_hybrid
from support.vllm.vllm_engines import VllmEngine
from support.vllm.vllm_placing import Bench
from support.vllm.vllm_traffic import Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

REQUESTS = 300
NUM_BLOCKS = 130
"""Of all groups together, which share one pool."""

MAX_TOKENS = 1152


@pytest.fixture(scope="module", params=MODELS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engines(tmp_path_factory, vllm_python, kind):
    directory = tmp_path_factory.mktemp(f"vllm-{kind}")
    write_tiny_hybrid(directory / kind, kind)
    size = f"--num-gpu-blocks-override={NUM_BLOCKS}", f"--max-model-len={MAX_TOKENS}"
    options = ("--load-format=dummy", *size)
    engines = {
        i: VllmEngine(vllm_python, directory / kind, directory, f"w{i}", options=options)
        for i in (1, 2)
    }
    try:
        for engine in engines.values():
            engine.start()
        for engine in engines.values():
            engine.wait()
        yield engines
    finally:
        for engine in engines.values():
            engine.kill()


async def test_predicted_tokens_of_a_hybrid_are_the_cached_ones(
    direct, engines, kind, record_property
):
    fields = {"hybrid": {"chunk_tokens": CHUNK_TOKENS}} if kind == "chunk" else {}
    await direct.attach(engines, total_kv_blocks=NUM_BLOCKS, **fields)
    bench, traffic, rng = Bench([direct], engines), Traffic(seed=11), Random(11)
    try:
        for _ in range(REQUESTS):
            ask = traffic.next()
            among = engines if rng.random() < 0.8 else {rng.choice(list(engines))}
            answer = await bench.place(ask, among)
            traffic.answered(ask, answer.token_ids)
        evicted = await asyncio.to_thread(_evictions, engines)
    finally:
        for line in bench.summary():
            record_property("measured", f"{kind}: {line}")
    assert evicted
    assert not bench.wrong
    assert sum(each.is_exact for each in bench.outcomes) >= 0.95 * REQUESTS
    assert any(each.cached_tokens for each in bench.outcomes)


def _evictions(engines):
    events = (event for engine in engines.values() for event in engine.history())
    return sum(event["type"] == "BlockRemoved" for event in events)
