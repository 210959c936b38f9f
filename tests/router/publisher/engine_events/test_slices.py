"""Long parts in slices: each whole, in order, and together what the part was."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.publisher.engine_events import slices
from router.publisher.engine_events.batch import EngineRemoved, EngineStored, StoredRun
from router.publisher.engine_events.slices import block_count, sliced
from support.chaos.fuzzing import examples
from support.engines.engines import Edge, batch, names, removed, stored

BLOCK_SIZE = 4


@pytest.fixture(autouse=True)
def slices_are_short(monkeypatch):
    monkeypatch.setattr(slices, "SLICE_BLOCKS", 8)


def event(first, blocks, parent=None, **fields):
    hashes = np.arange(first, first + blocks, dtype=np.uint64)
    tokens = np.arange(blocks * BLOCK_SIZE, dtype=np.uint32)
    return EngineStored(hashes, parent, tokens, BLOCK_SIZE, "GPU", **fields)


def run_of(events):
    heads, first = [], 0
    for each in events:
        heads += [first, each.parent or 0, each.parent is not None]
        first += len(each.block_hashes)
    whole = EngineStored(
        np.concatenate([each.block_hashes for each in events]),
        events[0].parent,
        np.concatenate([each.tokens for each in events]),
        BLOCK_SIZE,
        "GPU",
    )
    return StoredRun(whole, np.array(heads, np.uint64))


def listed(parts):
    """Each block with what comes before it and its tokens, event by event."""
    blocks = []
    for part in parts:
        for each in part.events() if isinstance(part, StoredRun) else (part,):
            parent, hashes = each.parent, each.block_hashes.tolist()
            assert len(each.tokens) == len(hashes) * BLOCK_SIZE
            for place, name in enumerate(hashes):
                tokens = each.tokens[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE].tolist()
                blocks.append((name, parent, tokens))
                parent = name
    return blocks


def test_divided_event_continues_its_parent_chain():
    whole = event(1, 20, parent=77)
    parts = list(sliced(whole, BLOCK_SIZE, 0))
    assert [block_count(part) for part in parts] == [8, 8, 4]
    assert listed(parts) == listed([whole])


def test_removals_are_of_single_copies():
    parts = list(sliced(EngineRemoved(np.arange(20, dtype=np.uint64), "GPU"), BLOCK_SIZE, 0))
    assert [len(part.block_hashes) for part in parts] == [8, 8, 4]


@pytest.mark.parametrize(
    "whole",
    [
        event(1, 20, lora_name="a"),
        event(1, 20, extra_keys=((1,),) * 20),
        event(1, 20, parent=5),
        event(1, 20, is_eagle=True),
        event(1, 8),
        EngineStored(np.ones(20, np.uint64), None, np.zeros(80, np.uint32), BLOCK_SIZE, "GPU"),
        EngineStored(np.arange(20, dtype=np.uint64), None, np.zeros(79, np.uint32), 4, "GPU"),
    ],
)
def test_indivisible_event_stays_whole(whole):
    assert list(sliced(whole, BLOCK_SIZE, 0)) == [whole]


@settings(max_examples=examples(100))
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.booleans())
def test_a_run_is_divided_between_its_events(lengths, has_parents):
    first, events = 1, []
    for blocks in lengths:
        events.append(event(first, blocks, parent=first + 1000 if has_parents else None))
        first += blocks
    parts = list(sliced(run_of(events), BLOCK_SIZE, 0))
    assert listed(parts) == listed(events)
    assert all(block_count(part) <= slices.SLICE_BLOCKS for part in parts)


def test_sliced_batch_equals_single_events():
    tokens = list(range(400))
    events = [
        stored(range(1, 31), tokens[:120]),
        stored(range(31, 34), tokens[120:132], parent=30),
        stored(range(34, 101), tokens[132:], parent=33),
        removed(range(50, 90)),
    ]
    edge = Edge()
    edge.normalizer.apply(batch(*events), 0.0)
    edge.feed()
    every = names(tokens)
    assert edge.held() == set(every[:49] + every[89:])
    assert edge.counts.refused_events == edge.counts.unknown_removed == 0
    edge.normalizer.check_invariants()
