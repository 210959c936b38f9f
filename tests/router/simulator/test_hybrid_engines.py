"""Simulated engines with hybrid models, beside a model of vLLM's block pool, step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from oracle.hybrid import cached_tokens
from oracle.hybrid_engine import UNIT_TOKENS, HybridEngine, Layers
from router.protocol.values import Rank
from router.simulator.block_cache import Checkpoints, LayerGroups
from router.simulator.engine import Engine
from router.simulator.engine_model import llama_8b
from router.simulator.engine_runs import Work
from router.simulator.simulation import simulate
from router.simulator.summary import summarize
from router.simulator.traces import TraceRequest
from support.fleets.simulator_worlds import make_core, scenario, small_trace

WINDOW, STATE = LayerGroups("window", 2, 10), LayerGroups("state", 1)
LAYERS = st.sampled_from([(WINDOW,), (STATE,), (WINDOW, STATE), (LayerGroups("window", 1, 5),)])
FAMILIES = [[1] * 40, [1] * 17 + [2] * 23, [1] * 17 + [3] * 23, [1] * 30 + [4] * 10]


def served(engine, tokens):
    """The tokens that an engine finds cached of a prompt, which it serves to its end."""
    ends = range(UNIT_TOKENS, len(tokens) + 1, UNIT_TOKENS)
    hashes = [xxh3_64_intdigest(bytes(tokens[:end])) for end in ends]
    work = Work(-1, "", TraceRequest(0.0, len(tokens), 1, hashes))
    engine.submit(work, 0.0)
    while not engine.advance().finished:
        pass
    engine.cache.check_invariants()
    assert not engine.cache.used_blocks
    return work.cached_blocks * UNIT_TOKENS


def hybrid(layers, capacity_tokens):
    return Engine(replace(llama_8b(), capacity_tokens=capacity_tokens), UNIT_TOKENS, layers=layers)


@given(LAYERS, st.lists(st.tuples(st.sampled_from(FAMILIES), st.integers(1, 40)), max_size=12))
def test_prompts_one_after_another_resume_where_vllm_resumes_them(layers, prompts):
    groups = [Layers("full", UNIT_TOKENS)]
    for each in layers:
        groups += [Layers(each.kind, UNIT_TOKENS, each.span_tokens)] * each.groups
    model = HybridEngine(tuple(groups), pool_blocks=5_000, retention_tokens=0, chunk_tokens=1_000)
    engine = hybrid(layers, 20_000)
    for family, length in prompts:
        expected = model.hit(family[:length])
        model.begin(family[:length], [])
        while model.running:
            model.step()
        assert served(engine, family[:length]) == expected


@given(LAYERS, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=60))
def test_a_prompt_resumes_where_the_engines_rule_finds_its_blocks(layers, cached):
    """Any blocks of any groups may be evicted."""
    hashes, checkpoints = list(range(1, 13)), Checkpoints(layers, UNIT_TOKENS)
    cache = hybrid(layers, 2_000).cache
    names = [*hashes, *(hash_ + (g << 64) for g in (1, 2, 3) for hash_ in hashes)]
    held = {names[(7 * place + 13 * part) % len(names)] for place, part in cached} | set(hashes[:9])
    assert cache.take((), len(held))
    cache.name(list(held))
    index_of = [i for i, each in enumerate(layers) for _ in range(each.groups)]

    def holds(index, end):
        groups = [g for g, of in enumerate(index_of, 1) if of == index]
        return all(hashes[end // UNIT_TOKENS - 1] + (g << 64) in held for g in groups)

    def holds_full(end):
        return end <= 4 * len(hashes) and hashes[end // UNIT_TOKENS - 1] in held

    full = cache.matching(hashes, len(hashes))
    expected = cached_tokens(checkpoints.layout, holds_full, holds, 4 * full + 1)
    assert UNIT_TOKENS * checkpoints.resumable(cache, hashes, full) == expected


@pytest.mark.parametrize("layers", [(WINDOW, STATE), ()])
def test_routers_know_what_small_hybrid_engines_hold(layers):
    """Engines evict all the time; the index follows, after the lag."""
    cores = []

    def kept(rng):
        cores.append(make_core()(rng))
        return cores[0]

    small = replace(llama_8b(), capacity_tokens=8_192)
    fleet = scenario(3, model=small, layers=layers)
    assert summarize(simulate(small_trace(400), fleet, kept)).unserved == 0
    assert cores[0].index.differences == 0
    for worker_id in range(3):
        layout = cores[0].index.layout(Rank(worker_id, 0))
        classes = () if layout is None else layout.classes
        assert [each.kind for each in classes] == [each.kind for each in layers]


def test_hidden_classes_leave_full_attention():
    cores = []

    def kept(rng):
        cores.append(make_core()(rng))
        return cores[0]

    fleet = scenario(2, layers=(STATE,), hides_classes=True)
    summary = summarize(simulate(small_trace(), fleet, kept))
    assert cores[0].index.layout(Rank(0, 0)) is None
    assert cores[0].index.differences == 0
    plain = summarize(simulate(small_trace(), scenario(2), make_core()))
    assert summary.hit_rate < plain.hit_rate
