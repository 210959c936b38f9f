"""Stored events done together leave what they leave one by one."""

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router.protocol.values import Tier
from router.publisher.engine_events.batch import EngineRemoved, EngineStored, StoredRun
from router.publisher.engine_events.decoder import ScratchBuffer, decode_engine_batch
from router.publisher.journal.held_blocks import HeldBlocks, path_heads
from router.publisher.normalizer.settings import NormalizerLimits
from support.chaos.fuzzing import examples
from support.engines.engine_messages import payload, plain
from support.engines.engines import CLEARED, Edge, engine_hashes, joined, removed, stored

HASHES = st.integers(1, 12)
EVENTS = st.builds(
    lambda hashes, parent, first, fields, more: stored(
        hashes, [first] * (4 * len(hashes) + more), parent, **fields
    ),
    st.lists(HASHES, max_size=3),
    st.none() | HASHES,
    st.integers(0, 1),
    st.sampled_from([{}] * 6 + [{"medium": "CPU"}, {"medium": "?"}, {"lora_name": "ad"}]),
    st.sampled_from([0] * 8 + [-1, 1]),
)


def reported(event):
    """An event as an engine sends it."""
    if not isinstance(event, EngineStored | EngineRemoved):
        return {"type": "AllBlocksCleared"}
    fields = {"block_hashes": event.block_hashes.tolist(), "medium": event.medium}
    if isinstance(event, EngineRemoved):
        return {"type": "BlockRemoved", **fields}
    return {
        "type": "BlockStored",
        **fields,
        "parent_block_hash": event.parent,
        "token_ids": event.tokens.tolist(),
        "block_size": event.block_size,
        "lora_name": event.lora_name,
        "cache_salt": event.cache_salt,
    }


def shown(part):
    if isinstance(part, StoredRun):
        return (plain(part.whole), part.heads.tolist())
    return plain(part)


SOME = st.lists(EVENTS | st.builds(removed, st.lists(HASHES, max_size=3)), max_size=12)


@settings(max_examples=examples(20))
@given(st.lists(SOME, max_size=4), st.sampled_from([9, 1_000]))
def test_batches_and_single_events_lead_to_the_same(batches, known_blocks):
    limits = NormalizerLimits(known_blocks=known_blocks)
    together, one_by_one = Edge(limits=limits), Edge(limits=limits)
    for events in batches:
        together.feed(*events)
        for event in events:
            one_by_one.feed(event)
    assert together.journal.state == one_by_one.journal.state
    assert together.normalizer.stats == one_by_one.normalizer.stats
    for tier in Tier:
        assert together.held(tier) == one_by_one.held(tier)


def test_runs_are_of_events_that_are_alike():
    plain = [stored([n], range(4), n - 1) for n in range(1, 4)]
    others = [stored([5], range(4), medium="CPU"), stored([6], range(5)), stored([], [])]
    salted = [stored([n], range(4), cache_salt="s") for n in (7, 8)]
    events = [*plain, *others, *salted, removed([1]), *plain, CLEARED]
    parts = decode_engine_batch(payload(*map(reported, events))).parts
    assert [len(part) if isinstance(part, StoredRun) else 1 for part in parts] == [
        3, *[1] * 6, 3, 1
    ]  # fmt: skip


@settings(max_examples=examples(25))
@given(SOME)
def test_decoding_joins_what_is_alike_and_loses_nothing(events):
    batch = decode_engine_batch(payload(*map(reported, events)))
    assert [shown(part) for part in batch.parts] == [shown(part) for part in joined(batch.events)]
    assert [plain(event) for event in batch.events if isinstance(event, EngineStored)] == [
        plain(event) for event in events if isinstance(event, EngineStored)
    ]


def test_a_name_stored_twice_in_a_run_goes_with_its_second_copy():
    tokens = list(range(4))
    edge = Edge().feed(stored([1], tokens), stored([2], tokens))
    edge.feed(removed([1]))
    assert len(edge.held()) == 1
    edge.feed(removed([2]))
    assert edge.held() == set()


@settings(max_examples=examples(20))
@given(st.lists(st.tuples(st.none() | HASHES, st.integers(1, 300)), max_size=8), st.randoms())
def test_paths_are_held_as_if_they_came_one_by_one(paths, random):
    together, one_by_one = HeldBlocks(), HeldBlocks()
    parts = [[random.randrange(1, 400) for _ in range(count)] for _, count in paths]
    new = [
        one_by_one.store(Tier.HOST, part, parent).tolist()
        for part, (parent, _) in zip(parts, paths, strict=True)
    ]
    heads = path_heads([len(part) for part in parts], [parent for parent, _ in paths])
    keys = engine_hashes(chain(*parts))
    assert together.store_paths(Tier.HOST, keys, heads).tolist() == list(chain(*new))
    assert together.state() == one_by_one.state()
    together.check_invariants()


def test_a_room_is_used_again():
    room = ScratchBuffer()
    tokens, hashes = room.of(100)
    assert min(len(tokens), len(hashes)) >= 100
    assert np.shares_memory(tokens, room.of(50)[0])
    assert len(room.of(1 << 20)[0]) == 1 << 20
    assert np.shares_memory(tokens, room.of(100)[0])
