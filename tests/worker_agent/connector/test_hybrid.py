"""Hybrid models through both halves of the connector, over real tiers.

The engine reads every byte that it needs, and its windows free blocks that it fills again at once.
"""

import pytest

from support.blocks.connectors import groups_of
from support.engines.connector_engine import Engine
from worker_agent.connector import mover

PROMPT = list(range(100, 130))  # seven blocks of four, and two tokens
LAYOUTS = [
    [(4, None), (4, 9)],
    [(4, 6), (4, None), (4, 6)],
    [(4, None), (8, 12)],
    [(8, None), (4, 5)],
]


@pytest.fixture
def engine():
    engines = []

    def start(layout, host_blocks=40, disk_blocks=60, **options):
        engines.append(Engine(host_blocks, disk_blocks, groups=groups_of(layout), **options))
        return engines[-1]

    yield start
    for each in engines:
        each.drain()
        each.close()


def run(engine, key, tokens, steps=8, chunk=8):
    """Compute a request, and a token or two; how many tokens of it were loaded."""
    loaded = engine.loaded_tokens
    engine.add(key, tokens)
    for _ in range(steps):
        engine.step(chunk)
        engine.quiesce()
    engine.finish(key)
    engine.step()
    engine.quiesce()
    engine.step()
    assert engine.leader.counters.refused == engine.worker.counters.refused == 0
    return engine.loaded_tokens - loaded


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [3, 8, 20])
def test_prompt_is_restored_at_its_last_boundary(engine, layout, chunk):
    engine = engine(layout)
    boundary = len(PROMPT) // engine.groups.alignment * engine.groups.alignment
    assert run(engine, "a", PROMPT, steps=14, chunk=chunk) == 0
    assert run(engine, "b", PROMPT) == boundary
    assert run(engine, "c", [*PROMPT, 1, 2, 3, 4, 5]) == boundary


def test_only_the_blocks_that_a_window_needs_are_stored_and_loaded(engine):
    engine = engine([(4, None), (4, 9)])
    run(engine, "a", PROMPT)
    [host, _] = engine.stack.status()
    assert host.held_blocks == 8 + 2  # The answer fills an eighth block of full attention.
    run(engine, "b", PROMPT)
    [host, _] = engine.stack.status()
    assert host.up.blocks == 7 + 2


def test_prompt_that_leaves_another_is_restored_from_then_on(engine):
    engine = engine([(4, None), (4, 9)])
    run(engine, "a", PROMPT)
    siblings = [[*PROMPT[:20], *range(i, i + 5)] for i in (200, 300, 400)]
    assert run(engine, "b", siblings[0]) == 0
    assert run(engine, "c", siblings[1]) == 20
    assert run(engine, "d", siblings[2]) == 20


@pytest.mark.parametrize("group", [0, 1])
def test_one_bad_block_means_that_all_are_computed(engine, group):
    engine = engine([(4, None), (4, 9)])
    run(engine, "a", PROMPT)
    slot = engine.slots.create_slot("x", PROMPT)
    name = slot.names_behind(0, 0, 99)[group * 7 + 6]
    engine.slots.remove_slot("x", is_forced=True)
    for tier, stored in engine.tiers.items():
        [place] = stored.pool.scan([name.identity])
        engine.corrupt(tier, place)
    assert run(engine, "b", PROMPT, steps=12) == 0
    assert engine.leader.counters.failed_blocks == 9
    assert run(engine, "c", PROMPT) == 28  # What is right was stored again.


def test_long_prompts_are_loaded_piece_by_piece(engine, monkeypatch):
    monkeypatch.setattr(mover, "PIECE_BLOCKS", 4)
    engine = engine([(4, None), (4, 9)])
    run(engine, "a", PROMPT)
    assert run(engine, "b", PROMPT) == 28
    [host, _] = engine.stack.status()
    assert (host.up.blocks, host.up.calls) == (9, 3)


def test_with_no_window_block_left_full_attention_is_not_loaded(engine):
    """The tiers hold one prompt; another takes a part of its blocks."""
    engine = engine([(4, None), (4, 9)], host_blocks=10, disk_blocks=1)
    run(engine, "a", PROMPT)
    loaded = run(engine, "b", range(200, 212))
    assert loaded == 0
    assert run(engine, "c", PROMPT) == 0
    [host, _] = engine.stack.status()
    assert host.up.blocks == 0


def test_passing_blocks_are_gathered_before_the_engine_uses_them_again(engine):
    """Without the pace's leave: what it holds back of full attention comes later."""
    engine = engine([(4, None), (4, 9)], store_bytes_per_s=0.001, batch_blocks=1)
    engine.add("a", PROMPT)
    for _ in range(5):
        engine.step()
        engine.quiesce()
    engine.step()
    [host, _] = engine.stack.status()
    assert host.held_blocks == 4 + 2
    engine.preempt("a")
    engine.step(skipped={"a"})


def test_blocks_of_one_group_are_not_loaded_as_those_of_another(engine):
    """Two groups of one window and size: only what distinguishes their layers differs."""
    engine = engine([(4, None), (4, 9), (4, 9)])
    run(engine, "a", PROMPT)
    assert run(engine, "b", PROMPT) == 28
    groups = groups_of([(4, None), (4, 9), (4, 9)])
    slot = engine.slots.create_slot("x", PROMPT)
    identities = [name.identity for name in slot.names_behind(0, 0, 99)]
    assert len(set(identities)) == len(identities) == 7 * len(groups.all)
    engine.slots.remove_slot("x", is_forced=True)
