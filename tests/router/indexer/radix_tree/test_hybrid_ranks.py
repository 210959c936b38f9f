"""Ranks of hybrid models in the radix tree, against the definition."""

from math import lcm
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.index import ExactIndex
from oracle.machine import IDENTITY
from router.errors import WireError
from router.indexer.base import DIFFERENT, DONE, REFUSED, Overlap
from router.indexer.radix_tree import _block_table, _holder_sets
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.events import (
    ClassCleared,
    ClassRemoved,
    ClassStored,
    Cleared,
    EventBatch,
    Removed,
    Stored,
    pack_batch,
)
from router.protocol.hybrid import HybridState, LayerClass, Layout
from router.protocol.values import TIERS, HeldState, Rank, Tier, pack_hashes
from support.chaos.fuzzing import examples

W1, W2, W3 = Rank(1, 0), Rank(2, 0), Rank(3, 0)
WINDOW, STATE = LayerClass("window", 16, 33), LayerClass("state", 16)
ONE_WINDOW = Layout(16, 16, (WINDOW,))
TWO_CLASSES = Layout(16, 16, (WINDOW, STATE))
UNKNOWN_HOLES = (1, 1, 1, 1)


def array(*hashes):
    return np.array(hashes, dtype=np.uint64)


def span(start, end):
    return np.arange(start, end, dtype=np.uint64)


def small_tree(max_blocks=4000, **settings):
    return RadixTree(max_blocks, **{"sub_bits": 1, "check_interval": 10**9, **settings})


class Pair:
    """A tree and its definition, given the same batches and checkpoints."""

    def __init__(self, **settings):
        self.tree, self.oracle = small_tree(**settings), ExactIndex()

    def apply(self, rank, layout, *events, room_blocks=1000):
        """Apply a batch, and report what the definition holds after it."""
        hybrid = None
        if layout is not None:
            zeros = (0,) * len(layout.classes)
            hybrid = HybridState(layout, zeros, zeros)
        self.oracle.apply(rank, batch_of(rank, events, HeldState(), hybrid), 0, 0)
        held = self.oracle.summary(rank)
        state = HeldState(UNKNOWN_HOLES, held.counts, held.digests)
        if layout is not None:
            count = len(layout.classes)
            hybrid = HybridState(layout, held.class_counts[:count], held.class_digests[:count])
        batch, progress = batch_of(rank, events, state, hybrid), 0
        while progress >= 0:
            progress = self.tree.apply(rank, batch, progress, room_blocks)
        return progress

    def do(self, method, rank, *arguments):
        for index in (self.tree, self.oracle):
            assert getattr(index, method)(rank, *arguments) in (True, None)

    def agree(self, prompt, isl_tokens, block_size=16):
        found = dict(self.tree.resumable(prompt, isl_tokens, block_size).items())
        assert found == self.oracle.resumable(prompt, isl_tokens, block_size)
        return found

    def check(self):
        for rank in {rank for rank, _ in self.oracle.sets}:
            assert self.tree.summary(rank) == self.oracle.summary(rank)
        self.tree.check_invariants()


def batch_of(rank, events, state, hybrid=None):
    packed = pack_batch(state, events)
    return EventBatch(rank.worker_id, rank.dp_rank, 1, IDENTITY, 1, len(events), packed, hybrid)


def stored(hashes, tier=Tier.DEVICE):
    return Stored(tier, pack_hashes(hashes))


def class_stored(class_index, hashes):
    return ClassStored(class_index, pack_hashes(hashes))


def resumable(tree, rank, prompt, isl_tokens, block_size=16):
    return tree.resumable(prompt, isl_tokens, block_size)[rank].device


def test_a_window_is_resumed_where_its_last_blocks_stand():
    pair, prompt = Pair(), span(1, 21)
    pair.apply(W1, ONE_WINDOW, stored(prompt), class_stored(0, prompt[16:18]))
    assert pair.agree(prompt, 321) == {W1: Overlap(18, 18, 18, 18)}
    assert pair.tree.find_matches(prompt)[W1].device == 20
    assert pair.agree(prompt, 18 * 16)[W1].device == 0, "the last token is always computed"
    pair.check()


def test_all_classes_must_stand_at_one_position():
    pair, prompt = Pair(), span(1, 21)
    held = [stored(prompt), class_stored(0, prompt[5:18]), class_stored(1, prompt[[6, 11, 18]])]
    pair.apply(W1, TWO_CLASSES, *held)
    assert pair.agree(prompt, 1000)[W1].device == 12
    pair.apply(W1, TWO_CLASSES, ClassRemoved(0, pack_hashes(prompt[10:11])))
    assert pair.agree(prompt, 1000)[W1].device == 7


def test_a_run_that_reaches_the_first_block_may_be_short():
    pair, prompt = Pair(), span(1, 9)
    pair.apply(W1, Layout(16, 16, (LayerClass("window", 16, 1000),)), stored(prompt))
    assert pair.agree(prompt, 1000)[W1].device == 0
    pair.apply(W1, Layout(16, 16, (LayerClass("window", 16, 1000),)), class_stored(0, prompt[:3]))
    assert pair.agree(prompt, 1000)[W1].device == 3


def test_ends_are_cut_to_the_alignment():
    layout = Layout(64, 32, (LayerClass("window", 64, 64), LayerClass("state", 32)))
    pair, prompt = Pair(), span(1, 13)
    pair.apply(W1, layout, stored(prompt), class_stored(0, prompt[7:8]), class_stored(1, prompt))
    assert pair.agree(prompt, 1000)[W1].device == 8


def test_slower_tiers_of_a_hybrid_rank_resume_nothing_more():
    pair, prompt = Pair(), span(1, 11)
    held = [stored(prompt[:5]), stored(prompt, Tier.HOST), class_stored(0, prompt)]
    pair.apply(W1, ONE_WINDOW, *held)
    assert pair.agree(prompt, 1000)[W1] == Overlap(5, 5, 5, 5)


def test_plain_and_hybrid_ranks_are_in_one_answer():
    pair, prompt = Pair(), span(1, 31)
    pair.apply(W1, ONE_WINDOW, stored(prompt), class_stored(0, prompt[3:6]))
    pair.apply(W2, None, stored(prompt))
    pair.apply(W3, Layout(16, 16, (STATE,)), stored(prompt[:20]), class_stored(0, prompt[9:12]))
    assert pair.agree(prompt, 480) == {
        W1: Overlap(6, 6, 6, 6),
        W2: Overlap(30, 30, 30, 30),
        W3: Overlap(12, 12, 12, 12),
    }
    pair.check()


def test_a_layout_without_classes_leaves_a_token_to_compute():
    pair, prompt = Pair(), span(1, 9)
    pair.apply(W1, Layout(32, 16), stored(prompt))
    assert [pair.agree(prompt, n)[W1].device for n in (129, 128, 100)] == [8, 6, 6]


def test_a_rank_that_is_hybrid_no_longer_loses_its_classes():
    pair, prompt = Pair(), span(1, 9)
    pair.apply(W1, ONE_WINDOW, stored(prompt), class_stored(0, prompt))
    assert pair.apply(W1, None, stored(array(99))) == DONE
    assert pair.agree(prompt, 1000)[W1].device == 8
    pair.check()


def test_a_cleared_cache_keeps_the_layout():
    pair, prompt = Pair(), span(1, 9)
    pair.apply(W1, ONE_WINDOW, stored(prompt), class_stored(0, prompt))
    assert pair.apply(W1, ONE_WINDOW, Cleared(), stored(prompt)) == DONE
    assert pair.agree(prompt, 1000)[W1].device == 0
    assert pair.apply(W1, ONE_WINDOW, Cleared(Tier.DEVICE), stored(prompt)) == DONE
    assert pair.apply(W1, ONE_WINDOW, class_stored(0, prompt), ClassCleared(0)) == DONE
    assert pair.agree(prompt, 1000)[W1].device == 0
    assert pair.apply(W1, ONE_WINDOW, class_stored(0, prompt[:4])) == DONE
    assert pair.agree(prompt, 1000)[W1].device == 4
    pair.check()


def test_one_class_is_cleared_among_others():
    pair, prompt = Pair(), span(1, 9)
    pair.apply(W1, TWO_CLASSES, stored(prompt), class_stored(0, prompt), class_stored(1, prompt))
    assert pair.apply(W1, TWO_CLASSES, ClassCleared(1), class_stored(1, prompt[4:5])) == DONE
    assert pair.agree(prompt, 1000)[W1].device == 5
    pair.check()


def test_a_checkpoint_replaces_both_planes():
    pair, prompt = Pair(), span(1, 9)
    pair.apply(W1, ONE_WINDOW, stored(prompt), class_stored(0, prompt))
    pair.do("stage", W1, Tier.DEVICE, prompt[:6])
    pair.do("stage", W1, TIERS + 1, prompt[2:4])
    pair.do("stage", W1, TIERS, prompt[:5])
    assert pair.agree(prompt, 1000)[W1].device == 8
    pair.do("commit_staged", W1, TWO_CLASSES)
    assert pair.agree(prompt, 1000)[W1].device == 4
    pair.check()
    pair.do("stage", W1, Tier.DEVICE, prompt)
    pair.do("stage", W1, TIERS, prompt)
    pair.do("commit_staged", W1, None)
    assert pair.agree(prompt, 1000)[W1].device == 8
    pair.check()


def test_ranks_go_and_come_and_nothing_is_left():
    pair, prompt = Pair(), span(1, 9)
    for life in range(3):
        pair.do("stage", W1, TIERS, prompt)
        pair.do("drop_staged", W1)
        for rank in (W1, W2):
            pair.apply(rank, TWO_CLASSES, stored(prompt), class_stored(life % 2, prompt))
        pair.do("clear", W1)
        pair.check()
        pair.do("clear", W2)
    while pair.tree.sweep(16):
        pass
    stats = pair.tree.stats()
    assert (stats.blocks, stats.class_blocks, stats.unswept_holders) == (0, 0, 0)
    pair.check()


def test_sums_of_a_class_reveal_a_lost_change():
    pair, prompt = Pair(), span(1, 9)
    assert pair.apply(W1, ONE_WINDOW, stored(prompt), class_stored(0, prompt[:4])) == DONE
    held = pair.oracle.summary(W1)
    state = HeldState(UNKNOWN_HOLES, held.counts, held.digests)
    for counts, digests in [((5,), held.class_digests[:1]), (held.class_counts[:1], (1,))]:
        hybrid = HybridState(ONE_WINDOW, counts, digests)
        batch = batch_of(W1, [ClassRemoved(0, pack_hashes(array(999)))], state, hybrid)
        assert pair.tree.apply(W1, batch, 0, 100) == DIFFERENT


@pytest.mark.parametrize("layout", [None, ONE_WINDOW, Layout(16, 16)])
def test_an_event_of_a_class_that_is_not_there_is_malformed(layout):
    tree = small_tree()
    zeros = () if layout is None else (0,) * len(layout.classes)
    hybrid = None if layout is None else HybridState(layout, zeros, zeros)
    for event in (class_stored(1, array(1)), ClassRemoved(3, b""), ClassCleared(2)):
        with pytest.raises(WireError):
            tree.apply(W1, batch_of(W1, [event], HeldState(), hybrid), 0, 100)
    tree.check_invariants()


def test_a_full_table_of_classes_refuses():
    tree = small_tree(max_blocks=100)
    hybrid = HybridState(ONE_WINDOW, (101,), (0,))
    batch = batch_of(W1, [class_stored(0, span(1, 102))], HeldState(), hybrid)
    assert tree.apply(W1, batch, 0, 1000) == REFUSED
    assert tree.stats().class_blocks == 100


def test_blocks_of_classes_take_40_bytes_each():
    """Pages of the table, sets, and members; what is reserved and not touched takes nothing."""
    tree, random = RadixTree(), np.random.default_rng(1)
    hybrid = HybridState(TWO_CLASSES, (0, 0), (0, 0))
    for worker_id in range(16):
        hashes = random.integers(0, 1 << 63, 20_000, np.uint64)
        events = [class_stored(0, hashes), class_stored(1, hashes[::8])]
        batch = batch_of(Rank(worker_id, 0), events, HeldState(), hybrid)
        tree.apply(Rank(worker_id, 0), batch, 0, 1 << 20)
    classes = tree.classes.tree
    state, slot_bytes = classes.memory.state, 16 * int(_block_table.PAGE_SLOTS)
    table_bytes = slot_bytes * int(classes.memory.blocks.header[_block_table.NEXT_PAGE])
    set_bytes = slot_bytes * int(classes.memory.set_table.header[_block_table.NEXT_PAGE])
    set_bytes += 8 * _holder_sets.SET_COLUMNS * int(state[_holder_sets.NEXT_SET])
    member_bytes = 4 * int(state[_holder_sets.NEXT_MEMBER])
    assert (table_bytes + set_bytes + member_bytes) / classes.block_count() <= 40


def test_a_dump_lists_full_attention_only():
    pair = Pair()
    pair.apply(W1, ONE_WINDOW, stored(array(1, 2)), class_stored(0, array(1, 2, 3)))
    assert [each.sequence_hashes.tolist() for each in pair.tree.dump()] in ([[1, 2]], [[2, 1]])


def test_a_chunk_is_resumed_after_its_begin_as_far_as_it_is_held():
    layout, prompt = Layout(16, 16, (LayerClass("chunk", 16, 64),)), span(1, 21)
    pair = Pair()
    pair.apply(W1, layout, stored(prompt[:14]), class_stored(0, prompt[12:13]))
    pair.apply(W2, layout, stored(prompt[:14]), class_stored(0, prompt[13:14]))
    pair.apply(W3, layout, stored(prompt[:14]))
    found = pair.agree(prompt, 1000)
    assert [found[rank].device for rank in (W1, W2, W3)] == [13, 12, 12]
    assert pair.agree(prompt, 12 * 16 + 1)[W1].device == 12


def test_a_draft_of_full_attention_costs_the_last_block_of_the_hit():
    layout, prompt = Layout(16, 16, (STATE,), is_full_eagle=True), span(1, 21)
    pair = Pair()
    pair.apply(W1, layout, stored(prompt), class_stored(0, prompt[[14, 18, 19]]))
    assert [pair.agree(prompt, n)[W1].device for n in (321, 320, 319)] == [19, 19, 15]


def test_a_draft_with_a_window_needs_a_block_above_the_hit():
    layout = Layout(16, 16, (LayerClass("window", 16, 33, is_eagle=True),), is_full_eagle=True)
    pair, prompt = Pair(), span(1, 21)
    pair.apply(W1, layout, stored(prompt), class_stored(0, prompt[[10, 11, 12, 18, 19]]))
    assert pair.agree(prompt, 1000)[W1].device == 12
    pair.apply(W1, layout, class_stored(0, prompt[17:18]))
    assert [pair.agree(prompt, n)[W1].device for n in (1000, 320, 319)] == [19, 19, 12]


def test_ranks_of_several_words_are_resumed_each_where_it_stands():
    """200 ranks of three layouts and plain ones, many of which end and begin at one position."""
    random, pair, prompt = Random(5), Pair(), span(1, 61)
    layouts = [ONE_WINDOW, TWO_CLASSES, Layout(16, 16, (LayerClass("window", 16, 129),)), None]
    for worker_id in range(200):
        layout = random.choice(layouts)
        events = [stored(prompt[: random.randint(20, 60)])]
        for c in range(0 if layout is None else len(layout.classes)):
            start = random.randint(0, 50)
            events.append(class_stored(c, prompt[start : start + random.choice([1, 2, 8, 20])]))
        assert pair.apply(Rank(worker_id, 0), layout, *events) == DONE
    for isl_tokens in (961, 960, 500, 17):
        pair.agree(prompt, isl_tokens)


def _class(random, unit_tokens, is_eagle, is_plain):
    kind = random.choice(["window", "window", "state", "chunk"])
    if kind == "chunk" and (is_eagle or is_plain):
        kind = "window"
    size = unit_tokens * random.choice([1, 1, 1, 2, 3, 4])
    longest = random.choice([3, 10, 30]) * unit_tokens
    tokens = {"window": random.randint(1, longest), "state": 0}.get(kind, random.randint(4, 60))
    return LayerClass(kind, size, tokens, is_eagle and random.random() < 0.6)


def _layout(random, unit_tokens):
    """Mostly what engines have; sometimes a layout that only a damaged message has."""
    if random.random() < 0.2:
        return _layout_with_tails(random, unit_tokens)
    if random.random() < 0.3:
        return _layout_of_one_class(random, unit_tokens)
    is_eagle, is_plain = random.random() < 0.3, random.random() < 0.5
    made = [_class(random, unit_tokens, is_eagle, is_plain) for _ in range(random.randint(0, 3))]
    classes = tuple(dict.fromkeys(made))
    full = unit_tokens * random.choice([1, 1, 1, 2, 4])
    silent = unit_tokens * random.choice([1, 1, 1, 2, 3])
    alignment = lcm(full, silent, *(each.block_tokens for each in classes))
    if random.random() < 0.05:
        alignment = random.randint(1, 3 * unit_tokens)
    return Layout(alignment, full, classes, is_eagle and random.random() < 0.5)


def _layout_with_tails(random, unit_tokens):
    """Hits end at every hash, also inside blocks."""
    classes = LayerClass("state", unit_tokens), LayerClass("tail", unit_tokens)
    full = unit_tokens * random.choice([2, 4])
    return Layout(unit_tokens, full, classes, random.random() < 0.3)


def _layout_of_one_class(random, unit_tokens):
    """Blocks of one size; mostly with EAGLE, or a chunk."""
    kind, are_eagle = random.choice(["window", "state", "chunk"]), random.random() < 0.7
    tokens = {"window": random.randint(1, 8), "state": 0, "chunk": random.randint(1, 12)}[kind]
    only = LayerClass(kind, unit_tokens, tokens * unit_tokens, are_eagle and kind != "chunk")
    return Layout(unit_tokens, unit_tokens, (only,), random.random() < 0.6)


def _held(random, prompt, size):
    """Some blocks of a class of this size: runs, single ones, or nearly all."""
    ends = np.arange(size, len(prompt) + 1, size)
    part = random.choice([0.05, 0.3, 0.9, 0.98, 1.0])
    kept = np.array([random.random() < part for _ in ends], np.bool_)
    for _ in range(random.randint(0, 2)):
        start = random.randint(0, len(ends))
        kept[start : start + random.randint(1, 12)] = random.random() < 0.7
    return prompt[ends[kept] - 1]


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_resumable_prefixes_are_those_of_the_definition(seed):
    """Several layouts and plain ranks in one tree, at many lengths of a prompt."""
    random = Random(seed)
    unit_tokens, blocks = random.choice([1, 2, 16]), random.randint(1, 40)
    pair, prompt = Pair(), span(1, blocks + 1)
    layouts = [_layout(random, unit_tokens) for _ in range(random.randint(1, 3))]
    for worker_id in range(random.randint(1, 8)):
        layout = random.choice([*layouts, None])
        events = [stored(prompt[: random.choice([blocks, random.randint(0, blocks)])])]
        for c, each in enumerate(() if layout is None else layout.classes):
            events.append(class_stored(c, _held(random, prompt, each.block_tokens // unit_tokens)))
        rank = Rank(worker_id, 0)
        outcome = pair.apply(rank, layout, *events, room_blocks=random.choice([3, 1000]))
        assert outcome == DONE
        if random.random() < 0.1 and layout is not None and layout.classes:
            pair.apply(rank, layout, ClassCleared(0))
    for isl_tokens in {random.randint(0, (blocks + 2) * unit_tokens) for _ in range(12)}:
        pair.agree(prompt[: isl_tokens // unit_tokens], isl_tokens, unit_tokens)
    pair.agree(prompt, blocks * unit_tokens, unit_tokens)
    pair.agree(prompt, blocks * unit_tokens + 1, unit_tokens)
    pair.check()


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "class store", "class remove", "clear", "class clear"]),
        st.integers(0, 1),
        st.lists(st.integers(1, 12), max_size=6),
    ),
    max_size=4,
)


def _event(kind, number, hashes):
    packed = pack_hashes(array(*hashes))
    match kind:
        case "store":
            return Stored(Tier(number), packed)
        case "remove":
            return Removed(Tier(number), packed)
        case "class store":
            return ClassStored(number, packed)
        case "class remove":
            return ClassRemoved(number, packed)
        case "clear":
            return Cleared(Tier(number) if number else None)
    return ClassCleared(number)


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.sampled_from([W1, W2]), st.booleans(), CHANGES, st.integers(0, 5)),
        max_size=12,
    )
)
def test_the_plane_follows_batches_clears_and_checkpoints(steps):
    pair, prompt = Pair(), span(1, 13)
    for rank, is_hybrid, changes, after in steps:
        events = [_event(*change) for change in changes]
        if not is_hybrid:
            events = [event for event in events if isinstance(event, Stored | Removed | Cleared)]
        assert pair.apply(rank, TWO_CLASSES if is_hybrid else None, *events) == DONE
        if after == 0:
            pair.do("clear", rank)
        elif after == 1:
            pair.do("stage", rank, Tier.DEVICE, prompt[:8])
            pair.do("stage", rank, TIERS, prompt[4:8])
            pair.do("commit_staged", rank, TWO_CLASSES)
        elif after == 2:
            pair.tree.sweep(2)
        pair.agree(prompt, 193)
        pair.check()
