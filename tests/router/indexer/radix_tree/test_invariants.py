"""The check of a radix tree's memory: whatever is wrong in it is found."""

import numpy as np
import pytest

from router.indexer.radix_tree import _block_table, _holder_sets
from router.indexer.radix_tree.radix_tree import RadixTree
from router.protocol.values import Rank, Tier

RANKS = [Rank(i, 0) for i in range(6)]
SET = int(_holder_sets.SET)


def span(start, end):
    return np.arange(start, end, dtype=np.uint64)


@pytest.fixture
def tree():
    """Ranks that share blocks; one is cleared, one of one tier, one is staged, an id is free."""
    tree = RadixTree(2000, sub_bits=1)
    for i in range(8):
        tree.store(Rank(9, i), Tier.DEVICE, span(0, 10))
    for i in range(8):
        tree.clear(Rank(9, i))
    while tree.sweep(2):
        pass
    tree.store(RANKS[4], Tier.DEVICE, span(0, 600))
    tree.remove(RANKS[4], Tier.DEVICE, span(60, 600))
    for i, rank in enumerate(RANKS[:4]):
        tree.store(rank, Tier(i), span(5 * i, 40))
        tree.store(rank, Tier.HOST, span(30, 50 + i))
    tree.stage(RANKS[0], Tier.DEVICE, span(0, 20))
    tree.clear(RANKS[1])
    tree.clear(RANKS[2], Tier.DISK)
    tree.note_holes(RANKS[3], (0, 0, 0, 0))
    tree.check_invariants()
    return tree


def slot_with(table, wanted):
    """Index of the first used slot whose value is as wanted."""
    slots = table.slots.reshape(-1, 2)
    return next(i for i in np.flatnonzero(slots[:, 1]) if wanted(int(slots[i, 1])))


def a_set(tree):
    slot = slot_with(tree.memory.blocks, lambda value: value >= SET)
    return int(tree.memory.blocks.slots[2 * slot + 1]) & ~SET


def change(array, index, difference=1):
    array[index] = (int(array[index]) + difference) % 2 ** (8 * array.itemsize)


def header(name, difference=1):
    return lambda tree: change(tree.memory.blocks.header, name, difference)


def state(name):
    return lambda tree: change(tree.memory.state, name)


def of_a_set(name, difference=1):
    return lambda tree: change(tree.memory.sets, (a_set(tree), int(name)), difference)


def of_a_holder(rank, name, difference=1):
    return lambda tree: change(
        tree.memory.holders, (tree.holders.ids[RANKS[rank]], int(name)), difference
    )


def of_members(position, change_of_word):
    def damage(tree):
        at = int(tree.memory.sets[a_set(tree), int(_holder_sets.START)]) + position
        tree.memory.members[at] = change_of_word(int(tree.memory.members[at]))

    return damage


def of_a_block(word, change_of_word):
    def damage(tree):
        at = 2 * slot_with(tree.memory.blocks, lambda _: True) + word
        tree.memory.blocks.slots[at] = change_of_word(int(tree.memory.blocks.slots[at]))

    return damage


def swap_blocks(tree):
    slots = tree.memory.blocks.slots.reshape(-1, 2)
    first = slot_with(tree.memory.blocks, lambda _: True)
    later = slot_with(tree.memory.blocks, lambda value: value != slots[first, 1])
    slots[[first, later]] = slots[[later, first]]


def move_a_block_back(tree):
    """To a gap behind it, so that a gap lies between."""
    slots = tree.memory.blocks.slots.reshape(-1, 2)
    used = np.flatnonzero(slots[:, 1])
    last = used[used < 256][-1] if (used < 256).any() else used[-1]
    slots[last + 2] = slots[last]
    slots[last] = 0


def forget_a_set(tree):
    tree.memory.set_table.slots[2 * slot_with(tree.memory.set_table, lambda _: True) + 1] = 0
    sub = int(np.flatnonzero(tree.memory.set_table.used)[0])
    tree.memory.set_table.used[sub] -= 1
    tree.memory.set_table.header[_block_table.COUNT] -= 1


def swap_pages(tree):
    pages = tree.memory.blocks.pages
    pages[0], pages[1] = pages[1], pages[0]


def holders(damage):
    return lambda tree: damage(tree.holders)


DAMAGES = {
    "count": header(_block_table.COUNT),
    "limit": lambda tree: change(tree.memory.blocks.header, _block_table.MAX_COUNT, -1990),
    "multiplier": header(_block_table.MULTIPLIER, 2),
    "pages given out": header(_block_table.NEXT_PAGE),
    "used": lambda tree: change(tree.memory.blocks.used, 0),
    "capacity": lambda tree: change(tree.memory.blocks.capacity, 0, 256),
    "capacity without pages": lambda tree: change(tree.memory.blocks.capacity, 0, 5),
    "pages": swap_pages,
    "a page twice": lambda tree: tree.memory.blocks.pages.__setitem__(0, 1),
    "slots": swap_blocks,
    "a gap": move_a_block_back,
    "another key": of_a_block(0, lambda key: key ^ 1),
    "a key elsewhere": of_a_block(0, lambda key: key ^ 1 << 63),
    "another holder": of_a_block(1, lambda _: 1 << 4 | 1),
    "no holder": of_a_block(1, lambda _: 0),
    "an unknown holder": of_a_block(1, lambda _: 40_000 << 4 | 1),
    "a holder without a tier": of_a_block(1, lambda _: 1 << 4),
    "an unknown set": of_a_block(1, lambda _: SET | 1500),
    "a set forgotten": forget_a_set,
    "uses": of_a_set(_holder_sets.USES),
    "mix": of_a_set(_holder_sets.MIX),
    "profile": of_a_set(_holder_sets.PROFILE),
    "size": of_a_set(_holder_sets.SIZE, -1),
    "start": of_a_set(_holder_sets.START),
    "room": of_a_set(_holder_sets.ROOM),
    "little room": of_a_set(_holder_sets.ROOM, -1),
    "a member's tiers": of_members(0, lambda word: word ^ 1),
    "a member without a tier": of_members(0, lambda word: word & ~15),
    "a member": of_members(1, lambda word: word + 16),
    "the order of members": of_members(1, lambda word: word & 15),
    "sets given out": state(_holder_sets.NEXT_SET),
    "members given out": state(_holder_sets.NEXT_MEMBER),
    "free sets": lambda tree: tree.memory.state.__setitem__(_holder_sets.FREE_SET, a_set(tree)),
    "free members": lambda tree: tree.memory.state.__setitem__(
        _holder_sets.FREE_MEMBERS + np.uint64(1),
        tree.memory.sets[a_set(tree), int(_holder_sets.START)],
    ),
    "a rank's count": of_a_holder(0, _holder_sets.COUNTS),
    "a rank's digest": of_a_holder(0, int(_holder_sets.DIGESTS) + 1),
    "left over": of_a_holder(2, _holder_sets.LEFT_OVER),
    "left over of nobody": of_a_holder(0, _holder_sets.LEFT_OVER),
    "visible": of_a_holder(0, _holder_sets.VISIBLE, -1),
    "kept": of_a_holder(0, _holder_sets.KEEP, -1),
    "trusted though found out": of_a_holder(3, _holder_sets.FORCED_OPEN),
    "trusted though unswept": of_a_holder(2, _holder_sets.CLOSED),
    "an id lost": holders(lambda h: h.free.pop()),
    "an id free twice": holders(lambda h: h.free.append(h.free[0])),
    "an id free and used": holders(lambda h: h.free.append(h.ids[RANKS[0]])),
    "an id to be swept and free": holders(lambda h: h.free.append(min(h.unswept))),
    "a sweep forgotten": holders(lambda h: h.unswept.clear()),
    "a sweep too much": holders(lambda h: h.unswept.add(h.ids[RANKS[0]])),
    "a name": holders(lambda h: h.rank_of.__setitem__(h.ids[RANKS[0]], RANKS[5])),
    "a name of the past": holders(lambda h: h.rank_of.__setitem__(min(h.unswept), RANKS[1])),
    "staged twice": holders(lambda h: h.staged.update({RANKS[1]: h.staged[RANKS[0]]})),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_raises_assertion_error(tree, damage):
    damage(tree)
    with pytest.raises(AssertionError):
        tree.check_invariants()
