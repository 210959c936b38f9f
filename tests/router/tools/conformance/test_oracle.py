import pytest

from router.tools.conformance.corpus import SCENARIOS
from router.tools.conformance.events import (
    as_array,
    cleared,
    hashes,
    placeholder,
    prompt,
    removed,
    signed,
    stored,
    text,
)
from router.tools.conformance.oracle import EngineCache, Oracle
from router.tools.conformance.steps import Ask, EngineSpec, Salt

A = text("a", 4)


def cache(*events, **spec):
    cache = EngineCache(EngineSpec(**spec))
    for event in events:
        cache.apply(event)
    return cache


MODELLED = [each for each in SCENARIOS if not any(engine.is_hybrid for engine in each.engines)]


@pytest.mark.parametrize("scenario", MODELLED, ids=lambda scenario: scenario.name)
def test_the_corpus_states_the_truth(scenario):
    oracle = Oracle(scenario.engines)
    asks = 0
    for step in scenario.steps:
        oracle.follow(step)
        if isinstance(step, Ask):
            assert oracle.cached_blocks(step.prompt) == step.cached_blocks
            asks += 1
    assert asks


def test_scenarios_have_names_of_their_own():
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)


def test_a_block_is_held_until_its_last_copy_goes():
    held = cache(stored(A), stored(A), removed(A, 3))
    assert held.cached_blocks(prompt(A)) == 4
    held.apply(removed(A, 3))
    assert held.cached_blocks(prompt(A)) == 3


def test_an_announcement_of_what_is_held_is_no_copy():
    held = cache(stored(A), stored(A), removed(A, 3), reannounces=True)
    assert held.cached_blocks(prompt(A)) == 3


def test_blocks_behind_a_hole_come_back_with_it():
    held = cache(stored(A), removed(A, 1))
    assert held.cached_blocks(prompt(A)) == 1
    held.apply(stored(A, 1, 2))
    assert held.cached_blocks(prompt(A)) == 4


def test_children_stored_before_their_parents_count():
    assert cache(stored(A, 2), stored(A, 0, 2)).cached_blocks(prompt(A)) == 4


def test_equal_tokens_with_another_salt_or_lora_are_other_blocks():
    salted = cache(stored(A, extra_keys=[[Salt("s")], None, None, None]))
    assert salted.cached_blocks(prompt(A)) == 0
    assert salted.cached_blocks(prompt(A, cache_salt="s")) == 4
    adapted = cache(stored(A, lora_name="ad", extra_keys=[["ad", Salt("s")], *[["ad"]] * 3]))
    assert adapted.cached_blocks(prompt(A, lora_name="ad")) == 0
    assert adapted.cached_blocks(prompt(A, lora_name="ad", cache_salt="s")) == 4


def test_another_tier_holds_what_the_device_let_go():
    offloaded = [stored(A), placeholder(A, "CPU"), removed(A, 3, 2, 1, 0)]
    assert cache(*offloaded).cached_blocks(prompt(A)) == 4
    assert cache(*offloaded, removed(A, 3, medium="CPU")).cached_blocks(prompt(A)) == 3


def test_sglang_clears_all_tiers_and_vllm_the_device():
    events = [stored(A), placeholder(A, "CPU"), cleared()]
    assert cache(*events).cached_blocks(prompt(A)) == 4
    assert cache(*events, kind="sglang").cached_blocks(prompt(A)) == 0


def test_arrays_and_signed_names_say_the_same():
    array = as_array(stored(A, names=signed(hashes(A))), 7)
    assert cache(array, removed(A, 3)).cached_blocks(prompt(A)) == 3
