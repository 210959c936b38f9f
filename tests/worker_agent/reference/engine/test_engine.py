"""The reference engine: what it says depends on the prompt, and on nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chaos.fuzzing import examples
from worker_agent.blocks.changes import BlockStored, CacheCleared
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.names import Naming
from worker_agent.blocks.pool import BlockPool
from worker_agent.reference.engine.batching import GenerationRequest
from worker_agent.reference.engine.cache import PagedCache
from worker_agent.reference.engine.engine import (
    EngineConfig,
    ReferenceEngine,
    StepInput,
    cache_shape,
)
from worker_agent.reference.engine.model import Model, ModelConfig
from worker_agent.reference.engine.tiering import RankMemory
from worker_agent.tiers.level import StackSettings
from worker_agent.tiers.stack import TierStack
from worker_agent.transfer.physical import physical

TEXT = list(b"It was the best of times, it was the worst of times, it was the age of wisdom, " * 4)
MODEL = Model(ModelConfig(2, 64, 4, 2, 512, 0), torch.device("cpu"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class VisibleEngine:
    """A reference engine in memory that a test can look at."""

    def __init__(self, model, config):
        shape = cache_shape(model.config, config.num_blocks, config.block_size)
        laid_out = physical("0").configured(shape.layout()).laid_out(config.layout.kind)
        no_tiers = TierStack([], StackSettings(shape.layout().block_bytes))
        pool = BlockPool(config.num_blocks, LruEviction())
        self.memory = RankMemory(pool, laid_out.allocated_on_host(), no_tiers)
        self.layers = PagedCache(shape, config.layout, self.memory.physical.regions).layers
        self.step = ReferenceEngine(model, config, Naming(bytes(16), "model"), self.memory).step


def engine(model=MODEL, num_blocks=128, block_size=16, max_batched_tokens=64, max_running=8):
    config = EngineConfig(num_blocks, block_size, max_batched_tokens, max_running)
    return ReferenceEngine(model, config, Naming(bytes(16), "model"))


def visible(max_batched_tokens=64):
    return VisibleEngine(MODEL, EngineConfig(128, 16, max_batched_tokens, 8))


def request(request_id, prompt, max_tokens=8, **fields):
    return GenerationRequest(request_id, prompt, max_tokens, **fields)


def run(rank, *requests, arriving_at=None):
    """Tokens and cached tokens by request; `arriving_at` step numbers, all at once by default."""
    arrivals = arriving_at or [0] * len(requests)
    tokens, cached, changes, number = {}, {}, [], 0
    while True:
        added = [r for r, at in zip(requests, arrivals, strict=True) if at == number]
        output = rank.step(StepInput(added=added))
        for generated in output.generated:
            tokens.setdefault(generated.request_id, []).append(generated.token)
            cached[generated.request_id] = generated.cached_tokens
        changes += output.changes
        number += 1
        if not output.has_work and number > max(arrivals):
            return tokens, cached, changes


def cold(prompt, max_tokens=8, **shape):
    return run(engine(**shape), request("x", prompt, max_tokens))[0]["x"]


def test_a_warm_cache_says_the_same_as_a_cold_one():
    rank = engine()
    first, cached, _ = run(rank, request("a", TEXT[:200]))
    assert cached["a"] == 0
    for length in (200, 199, 193, 192, 150):
        warm, cached, _ = run(rank, request("b", TEXT[:length]))
        assert cached["b"] == (length - 1) // 16 * 16
        assert warm["b"] == cold(TEXT[:length])
    assert first["a"] == cold(TEXT[:200])


def named_blocks(rank):
    """The bits under every name in a rank's cache."""
    layers = torch.stack(rank.layers, dim=1)
    names = map(rank.memory.pool.name, range(rank.memory.pool.num_blocks))
    return {name: layers[block] for block, name in enumerate(names) if name is not None}


def test_keys_and_values_are_the_same_to_the_bit_however_they_came_about():
    alone = visible(max_batched_tokens=512)
    run(alone, request("a", TEXT[:200], 40))
    expected = named_blocks(alone)
    assert len(expected) == 14
    crowded = visible(max_batched_tokens=23)
    others = [request(str(i), TEXT[i : 90 + 7 * i], 9) for i in range(1, 5)]
    run(crowded, *others, request("a", TEXT[:200], 40), arriving_at=[0, 1, 2, 3, 1])
    resumed = visible()
    for length in (70, 130, 200):
        run(resumed, request("a", TEXT[:length], 40))
    for rank in (crowded, resumed):
        found = named_blocks(rank)
        assert all(torch.equal(found[name], bits) for name, bits in expected.items())


def test_generated_blocks_are_as_good_as_computed_ones():
    rank = engine()
    first, _, _ = run(rank, request("a", TEXT[:60], 40))
    conversation = TEXT[:60] + first["a"]
    warm, cached, _ = run(rank, request("b", conversation))
    assert cached["b"] == 96
    assert warm["b"] == cold(conversation)


def test_other_requests_do_not_change_an_output():
    prompts = {str(i): TEXT[: 40 + 37 * i] for i in range(6)}
    together, _, _ = run(engine(), *(request(name, p) for name, p in prompts.items()))
    for name, prompt in prompts.items():
        assert together[name] == cold(prompt)


@settings(max_examples=examples(8))
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(20, 150), st.integers(1, 8), st.integers(0, 6)),
        min_size=2,
        max_size=4,
    ),
    st.integers(16, 80),
    st.sampled_from([4, 16, 48]),
)
def test_nothing_about_the_batch_matters(requests, max_batched_tokens, block_size):
    rank = engine(max_batched_tokens=max_batched_tokens, block_size=block_size)
    made = [
        request(str(i), TEXT[start : start + length], max_tokens)
        for i, (start, length, max_tokens, _) in enumerate(requests)
    ]
    tokens, _, _ = run(rank, *made, arriving_at=[at for *_, at in requests])
    for each in made:
        assert tokens[each.request_id] == cold(each.prompt, each.max_tokens)


def test_eviction_does_not_matter():
    rank = engine(num_blocks=14)
    expected = {number: cold(TEXT[number : number + 150]) for number in range(4)}
    for number in [0, 1, 0, 2, 3, 1, 0]:
        tokens, _, _ = run(rank, request("x", TEXT[number : number + 150]))
        assert tokens["x"] == expected[number]


def test_the_cache_is_what_makes_the_difference():
    """Not vacuous: a wrong block under a right name changes what is said."""
    rank = visible()
    first, _, _ = run(rank, request("a", TEXT[:200]))
    rank.layers[0][0] += 1.0
    wrong, cached, _ = run(rank, request("b", TEXT[:200]))
    assert cached["b"] > 0
    assert wrong["b"] != first["a"]


def test_outputs_are_not_all_the_same():
    said = {tuple(cold(TEXT[start : start + 100])) for start in range(6)}
    assert len(said) > 3
    assert len(set(cold(TEXT[:100], 32))) > 4


def test_every_token_of_the_prompt_counts():
    changed = list(TEXT[:150])
    changed[3] ^= 1
    assert cold(changed, 16) != cold(TEXT[:150], 16)


def test_other_seeds_are_other_models():
    other = Model(ModelConfig(2, 64, 4, 2, 512, 1), torch.device("cpu"))
    assert cold(TEXT[:100], model=other) != cold(TEXT[:100])


def test_a_temperature_samples_and_a_seed_repeats_it():
    def sampled(seed):
        made = request("x", TEXT[:50], 16, temperature=2.0, seed=seed)
        return run(engine(), made)[0]["x"]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_operations_are_counted():
    rank = engine(max_batched_tokens=32)
    run(rank, request("a", TEXT[:100], 5))
    run(rank, request("b", TEXT[:100], 5))
    output = rank.step(StepInput())
    counters = output.counters
    assert counters.prefill_tokens == 100 + 4
    assert counters.cached_tokens == 96
    assert counters.prefill_token_contexts == 100 * 50 + 4 * (96 + 2)
    assert counters.decode_requests == 4 + 4
    assert counters.resident_kv_tokens == 2 * sum(range(101, 105))
    assert counters.steps == 4 + 4 + 1 + 4
    assert (counters.requests_received, counters.requests_finished) == (2, 2)
    assert 0 < counters.busy_s < 60


def test_gauges_are_of_the_moment():
    rank = engine(max_running=1)
    output = rank.step(StepInput(added=[request("a", TEXT[:100]), request("b", TEXT[:30])]))
    assert (output.gauges.running_requests, output.gauges.waiting_requests) == (1, 1)
    assert output.gauges.waiting_uncached_tokens == 30 - 16
    assert output.gauges.kv_used_blocks == 7


def test_stores_and_clears_are_reported():
    rank = engine()
    _, _, changes = run(rank, request("a", TEXT[:40]))
    assert [type(change) for change in changes] == [BlockStored, BlockStored]
    output = rank.step(StepInput(clear_cache=True))
    assert output.changes == [CacheCleared()]
    assert run(rank, request("b", TEXT[:40]))[1]["b"] == 0


def test_an_aborted_request_leaves_the_others_alone():
    rank = engine()
    rank.step(StepInput(added=[request("a", TEXT[:100]), request("b", TEXT[50:150])]))
    tokens = []
    output = rank.step(StepInput(aborted=["a"]))
    while output.has_work or output.generated:
        tokens += [g.token for g in output.generated if g.request_id == "b"]
        assert all(g.request_id == "b" for g in output.generated)
        output = rank.step(StepInput())
    assert tokens == cold(TEXT[50:150])
    assert output.gauges.kv_used_blocks == 0


def test_shape_of_the_default_model():
    config = ModelConfig(4, 256, 8, 2, 4096, 0)
    assert (config.head_dim, config.ffn_size) == (32, 704)
