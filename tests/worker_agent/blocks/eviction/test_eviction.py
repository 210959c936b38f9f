"""The order of eviction: every policy against its definition, step by step."""

from bisect import bisect_right
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import InvalidFieldError
from worker_agent.blocks.eviction.base import Unused
from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.blocks.eviction.multi_lru import DEFAULT_THRESHOLDS, MultiLruEviction
from worker_agent.blocks.eviction.simple import LruEviction, PriorityEviction
from worker_agent.blocks.eviction.tiny_lfu import TinyLfu
from worker_agent.blocks.names import BlockName

BLOCKS = 12


def identity(number):
    """What a block holds."""
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


class Model:
    """What there is, and the definition of the order of eviction."""

    def __init__(self, first):
        self.unused, self.asks, self._first = {}, {}, first

    def pop(self):
        return self._first(self)


def lru(model):
    return min(model.unused, key=lambda block: model.unused[block].returned_tick)


def by_priority(model):
    unused = model.unused
    return min(unused, key=lambda block: (unused[block].priority, unused[block].returned_tick))


def seldom_asked(model):
    """Each block's level was found when it was returned."""
    levels = {b: bisect_right(DEFAULT_THRESHOLDS, model.asks[b]) for b in model.unused}
    return min(model.unused, key=lambda b: (levels[b], model.unused[b].returned_tick))


def lineage(model):
    parents = {each.name.parent_identity for each in model.unused.values()}
    leaves = {b: each for b, each in model.unused.items() if each.name.identity not in parents}
    return min(leaves, key=lambda block: (leaves[block].priority, leaves[block].returned_tick))


POLICIES = {
    "lru": (LruEviction, lru),
    "priority": (PriorityEviction, by_priority),
    "lineage": (LineageEviction, lineage),
    "multi_lru": (lambda: MultiLruEviction(4096), seldom_asked),
}

steps = st.lists(
    st.tuples(st.sampled_from(["turn", "turn", "pop"]), st.integers(0, BLOCKS - 1)), max_size=60
)
parents = st.lists(st.integers(0, BLOCKS - 1), min_size=BLOCKS, max_size=BLOCKS)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=steps, parents=parents, priorities=st.lists(st.integers(0, 2), min_size=BLOCKS))
def test_agrees_with_its_definition(name, steps, parents, priorities):
    make, first = POLICIES[name]
    policy, model = make(), Model(first)
    for tick, (step, block) in enumerate(steps):
        if step == "pop" and model.unused:
            expected = model.pop()
            del model.unused[expected]
            assert policy.pop(1) == [expected]
        elif step == "turn" and block in model.unused:
            policy.remove([block])
            del model.unused[block]
        elif step == "turn":
            # Parents come before their children, as prefixes do; 0 is a first block.
            parent = identity(parents[block] % block) if block else None
            unused = Unused(
                BlockName(identity(block), 0, parent), priorities[block % len(priorities)], tick
            )
            policy.note_uses([unused.name.identity] * (block + 1))
            model.asks[block] = min(model.asks.get(block, 0) + block + 1, 15)
            policy.add([block], [unused])
            model.unused[block] = unused
        assert len(policy) == len(model.unused)
        policy.check_invariants()


CHAINS, LENGTH = 3, 6
batches = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, CHAINS - 1), st.integers(0, LENGTH - 1)),
        st.tuples(st.just("use"), st.integers(0, CHAINS - 1), st.integers(0, LENGTH)),
        st.tuples(st.just("take"), st.integers(0, CHAINS * LENGTH - 1), st.integers(1, 4)),
        st.tuples(st.just("pop"), st.integers(1, 7), st.just(0)),
    ),
    max_size=40,
)


@given(
    batches=batches,
    fork=st.integers(0, LENGTH - 1),
    priorities=st.lists(st.integers(0, 1), min_size=5),
)
def test_prompts_are_given_up_as_if_block_by_block(batches, fork, priorities):
    """Prompts that are returned, used from their begin, and in part; all branch off the first."""
    policy, model, tick = LineageEviction(), Model(lineage), 0

    def name(block):
        chain, place = divmod(block, LENGTH)
        before = block - 1 if place else fork if chain else None
        return BlockName(identity(block), 0, None if before is None else identity(before))

    for step, first, count in batches:
        if step == "add":
            blocks = [first * LENGTH + place for place in range(count, -1, -1)]
            blocks = [block for block in blocks if block not in model.unused]
            turns = [priorities[block % len(priorities)] for block in blocks]
            unused = [Unused(name(b), turns[i], tick + i) for i, b in enumerate(blocks)]
            tick += len(blocks)
            policy.add(blocks, unused)
            model.unused.update(zip(blocks, unused, strict=True))
        elif step == "pop":
            expected = []
            while model.unused and len(expected) < first:
                expected.append(model.pop())
                del model.unused[expected[-1]]
            assert policy.pop(len(expected)) == expected
        else:
            start = first * LENGTH if step == "use" else first
            used = [block for block in range(start, start + count) if block in model.unused]
            policy.remove(used)
            for block in used:
                del model.unused[block]
        assert len(policy) == len(model.unused)
        policy.check_invariants()


def test_a_prompt_is_given_up_from_its_end():
    policy = LineageEviction()
    chain = [identity(number) for number in range(5)]
    for block in range(5):  # the first was returned first: to LRU it would be the one to go
        parent = chain[block - 1] if block else None
        policy.add([block], [Unused(BlockName(chain[block], 0, parent), 0, block)])
    assert policy.pop(5) == [4, 3, 2, 1, 0]


def test_a_parent_that_became_a_leaf_keeps_its_time():
    policy = LineageEviction()
    policy.add([0], [Unused(BlockName(identity(0), 0, None), 0, 1)])
    policy.add([1], [Unused(BlockName(identity(1), 0, identity(0)), 0, 2)])
    policy.add([2], [Unused(BlockName(identity(2), 0, None), 0, 3)])
    policy.add([3], [Unused(BlockName(identity(3), 0, None), 0, 4)])
    assert policy.pop(4) == [1, 0, 2, 3]


def test_higher_priority_outlives_later_use():
    policy = LineageEviction()
    names = [BlockName(identity(n), 0, identity(n - 1) if n % 2 else None) for n in range(4)]
    policy.add([1, 0], [Unused(names[1], 7, 0), Unused(names[0], 0, 1)])
    policy.add([3, 2], [Unused(names[3], 0, 2), Unused(names[2], 0, 3)])
    assert policy.pop(4) == [3, 2, 1, 0]  # 0 matters little, and 1 comes after it


def test_repeated_use_takes_no_more_room():
    policy = LineageEviction()
    for tick in range(1000):
        policy.add(
            [0, 1], [Unused(BlockName(identity(n), 0, None), 0, 2 * tick + n) for n in (0, 1)]
        )
        policy.remove([0, 1])
        policy.check_invariants()


@pytest.mark.parametrize("make", [LruEviction, PriorityEviction, LineageEviction])
def test_empty_eviction_evicts_nothing(make):
    with pytest.raises(KeyError):
        make().pop(1)
    with pytest.raises(KeyError):
        make().remove([0])


def test_frequent_blocks_are_evicted_last():
    policy = MultiLruEviction(64)
    for number, asks in enumerate((15, 9, 4, 0, 1)):
        for _ in range(asks):
            policy.note_uses([identity(number)])
    for block in range(5):
        policy.add([block], [Unused(BlockName(identity(block), 0, None), 0, block)])
        policy.check_invariants()
    policy.remove([4])
    policy.check_invariants()
    with pytest.raises(KeyError):
        policy.pop(5)
    assert policy.pop(3) + policy.pop(1) == [3, 2, 1, 0]
    with pytest.raises(KeyError):
        policy.pop(1)
    with pytest.raises(KeyError):
        policy.remove([4])


@pytest.mark.parametrize("thresholds", [(3, 3, 15), (0, 8, 15), (3, 8, 16), (8, 3, 15)])
def test_falling_frequency_thresholds_are_refused(thresholds):
    with pytest.raises(InvalidFieldError, match="three rising counts"):
        MultiLruEviction(8, thresholds)


asked = st.lists(st.integers(0, 200), max_size=300)


@given(asked)
def test_counts_are_never_too_low(asks):
    sketch = TinyLfu(256)
    sketch.note([identity(number) for number in asks])
    for number in set(asks):
        assert sketch.counts([identity(number)]) >= [min(asks.count(number), 15)]


@given(st.lists(st.lists(st.integers(0, 5), max_size=400), max_size=4), st.sampled_from([2, 8, 64]))
def test_many_are_counted_as_if_one_by_one(asks, capacity):
    """Of few names, so that they are there often; and few counters, so that all are halved."""
    together, single = TinyLfu(capacity), TinyLfu(capacity)
    for names in ([identity(number) for number in run] for run in asks):
        together.note(names)
        for name in names:
            single.note([name])
        assert together.counts(names) == [single.counts([name])[0] for name in names]


def test_counts_are_seldom_too_high():
    sketch = TinyLfu(1024)
    sketch.note([identity(number) for number in range(1000)])
    counts = sketch.counts([identity(number) for number in range(1000, 3000)])
    assert sum(count > 0 for count in counts) < 400
    # A row is 62 % full: all four counters are for one name in seven.


def test_old_frequencies_are_forgotten():
    sketch = TinyLfu(16)
    sketch.note([identity(1)] * 12)
    assert sketch.counts([identity(1)]) == [12]
    sketch.note([identity(2)] * 148)
    assert sketch.counts([identity(1), identity(2)]) == [6, 7]
