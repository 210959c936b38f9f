"""The invariants of a radix tree, checked against its memory without its kernels."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.indexer.radix_tree import _block_table, _holder_sets
from router.indexer.radix_tree._block_table import Table, Words
from router.indexer.radix_tree._memory import Memory
from router.indexer.radix_tree.holders import Holders
from router.protocol.values import FASTEST_TIER, TIERS, U64_MAX

Integers = npt.NDArray[np.int64]

_ALL = 15
_SET = _holder_sets.SET
_PAGE_SLOTS = int(_block_table.PAGE_SLOTS)
_FASTEST = np.array(FASTEST_TIER, dtype=np.uint64)
_BITS = np.array([mask.bit_count() for mask in range(_ALL + 1)])
_MIX_STEPS = ((np.uint64(30), 0xBF58476D1CE4E5B9), (np.uint64(27), 0x94D049BB133111EB))
_SUMMARY = slice(int(_holder_sets.COUNTS), int(_holder_sets.DIGESTS) + TIERS)
_VISIBLE, _KEEP, _CLOSED = (
    int(_holder_sets.VISIBLE),
    int(_holder_sets.KEEP),
    int(_holder_sets.CLOSED),
)
_FORCED_OPEN, _LEFT_OVER = int(_holder_sets.FORCED_OPEN), int(_holder_sets.LEFT_OVER)


class _Sets(NamedTuple):
    """The sets that slots refer to, by id; `words` are all their members, set by set."""

    ids: Words
    sizes: Integers
    begins: Integers
    words: Words


def check_radix_tree(memory: Memory, holders: Holders) -> None:
    """Assert the invariants of `_table`, `_sets` and `radix_tree`. O(size of the tree)."""
    blocks, references = _table_entries(memory.blocks)
    sets = _live_sets(memory, references)
    _check_free_room(memory, sets)
    _check_counts(memory.holders[: holders.next_id], *_memberships(blocks, references, sets))
    _check_ids(holders)


def _table_entries(table: Table) -> tuple[Words, Words]:
    """Return keys and values, after checking that a search finds each of them in its place."""
    capacity, used = table.capacity.astype(np.int64), table.used.astype(np.int64)
    subs = np.flatnonzero(capacity)
    rows = table.slots.reshape(-1, _PAGE_SLOTS, 2)[_pages(table, subs)].reshape(-1, 2)
    taken = rows[:, 1] != 0
    places = np.flatnonzero(taken)
    mixed, values = rows[places].T
    ends = np.cumsum(capacity[subs])
    assert not taken[ends - 1].any(), "the last slot is used"
    which = np.searchsorted(ends, places, side="right")
    sub, starts = subs[which], (ends - capacity[subs])[which]
    assert np.array_equal(np.bincount(sub, minlength=len(used)), used), "used slots"
    assert (4 * used <= 3 * capacity).all(), "load"
    assert (
        len(mixed)
        == int(table.header[_block_table.COUNT])
        <= int(table.header[_block_table.MAX_COUNT])
    )
    assert ((mixed[1:] > mixed[:-1]) | (sub[1:] != sub[:-1])).all(), "keys out of order"
    homes = starts + _homes(table, mixed.tolist(), sub.tolist(), capacity[sub].tolist())
    taken_before = np.concatenate([[0], np.cumsum(taken)])
    taken_from_home = taken_before[places] - taken_before[homes]
    assert np.array_equal(taken_from_home, places - homes), "a gap between home and slot"
    return mixed * table.header[_block_table.INVERSE], values


def _pages(table: Table, subs: Integers) -> Integers:
    """Return the pages of the sub-tables, in the order of their slots; must be all allocated."""
    pages: list[int] = []
    by_sub = table.pages.reshape(-1, len(table.capacity))
    for sub in subs.tolist():
        slots = int(table.capacity[sub])
        assert slots % _PAGE_SLOTS == 0, "half a page"
        assert slots <= int(table.header[_block_table.MAX_SUB_PAGES]) * _PAGE_SLOTS
        pages += by_sub[: slots // _PAGE_SLOTS, sub].tolist()
    next_page = int(table.header[_block_table.NEXT_PAGE])
    assert next_page <= int(table.header[_block_table.MAX_PAGES])
    assert sorted(pages) == list(range(next_page)), "pages"
    return np.array(pages, dtype=np.int64)


def _homes(table: Table, mixed: list[int], subs: list[int], capacities: list[int]) -> Integers:
    multiplier, inverse = (
        int(table.header[_block_table.MULTIPLIER]),
        int(table.header[_block_table.INVERSE]),
    )
    assert multiplier * inverse & U64_MAX == 1
    sub_bits, spare = int(table.header[_block_table.SUB_BITS]), int(_block_table.SPARE_SLOTS)
    homes = []
    for key, sub, capacity in zip(mixed, subs, capacities, strict=True):
        assert key >> (64 - sub_bits) == sub, "a key in another sub-table than its own"
        homes.append(((key << sub_bits & U64_MAX) >> 32) * (capacity - spare) >> 32)
    return np.array(homes, dtype=np.int64)


def _live_sets(memory: Memory, references: Words) -> _Sets:
    """Return the sets referred to, after checking them against the table of sets."""
    ids, uses = np.unique(references[references >= _SET] & ~_SET, return_counts=True)
    mixes, known = _table_entries(memory.set_table)
    order = np.argsort(known)
    assert np.array_equal(known[order], ids), "live sets"
    rows = memory.sets[ids]
    sizes = rows[:, int(_holder_sets.SIZE)].astype(np.int64)
    words = memory.members[_ranges(rows[:, int(_holder_sets.START)].astype(np.int64), sizes)]
    sets = _Sets(ids, sizes, np.cumsum(sizes) - sizes, words.astype(np.uint64))
    if len(ids):
        assert sizes.min() > 1, "a set of one"
        assert np.array_equal(rows[:, int(_holder_sets.USES)], uses), "uses"
        assert np.array_equal(rows[:, int(_holder_sets.MIX)], mixes[order]), (
            "a mix unknown to the table"
        )
        _check_members(rows, sets)
    return sets


def _check_members(rows: Words, sets: _Sets) -> None:
    holders, masks = sets.words >> _holder_sets.MASK_BITS, sets.words & _holder_sets.MASK
    assert masks.all(), "a member without a tier"
    is_first = np.zeros(len(holders), np.bool_)
    is_first[sets.begins] = True
    assert (is_first[1:] | (holders[1:] > holders[:-1])).all(), "members out of order"
    mixes = np.bitwise_xor.reduceat(_mix(sets.words), sets.begins)
    assert np.array_equal(rows[:, int(_holder_sets.MIX)], mixes), "mix"
    parts = _mix(holders << _holder_sets.MASK_BITS | _FASTEST[masks])
    profiles = np.bitwise_xor.reduceat(parts, sets.begins)
    assert np.array_equal(rows[:, int(_holder_sets.PROFILE)], profiles), "profile"


def _check_free_room(memory: Memory, sets: _Sets) -> None:
    """Check that every allocated set id and stretch of members is in use, or free exactly once."""
    free, room = [], int(memory.state[_holder_sets.NEXT_SET])
    reference = int(memory.state[_holder_sets.FREE_SET])
    while reference:
        free.append(reference)
        assert len(free) <= room, "a ring of free sets"
        assert memory.sets[reference, int(_holder_sets.SIZE)] == 0, "a free set has members"
        reference = int(memory.sets[reference, int(_holder_sets.START)])
    assert sorted([*sets.ids.tolist(), *free]) == list(range(1, room + 1)), "set ids"
    rooms = memory.sets[sets.ids, int(_holder_sets.ROOM)].astype(np.int64)
    assert (sets.sizes <= 1 << rooms).all(), "more members than there is room for"
    starts = memory.sets[sets.ids, int(_holder_sets.START)].tolist()
    live = zip(starts, rooms.tolist(), strict=True)
    _check_stretches([*live, *_free_stretches(memory)], int(memory.state[_holder_sets.NEXT_MEMBER]))


def _free_stretches(memory: Memory) -> list[tuple[int, int]]:
    first, room = int(_holder_sets.FREE_MEMBERS), len(memory.members)
    stretches = []
    for bits, head in enumerate(memory.state[first:].tolist()):
        start = head
        while start:
            stretches.append((start, bits))
            assert len(stretches) <= room, "a ring of free stretches"
            start = int(memory.members[start])
    return stretches


def _check_stretches(stretches: list[tuple[int, int]], next_member: int) -> None:
    expected = 2
    for start, bits in sorted(stretches):
        assert start == expected, "stretches of members overlap, or one is lost"
        expected += 1 << bits
    assert expected == next_member


def _memberships(blocks: Words, references: Words, sets: _Sets) -> tuple[Words, Words]:
    """Return one pair {block, member word} per block and holder of it."""
    several = references >= _SET
    which = np.searchsorted(sets.ids, references[several] & ~_SET)
    sizes = sets.sizes[which]
    words = sets.words[_ranges(sets.begins[which], sizes)]
    return (
        np.concatenate([blocks[~several], np.repeat(blocks[several], sizes)]),
        np.concatenate([references[~several], words]),
    )


def _check_counts(rows: Words, blocks: Words, words: Words) -> None:
    """Check the rows' counts against all slots: blocks kept, and blocks left over."""
    holders, masks = (words >> _holder_sets.MASK_BITS).astype(np.int64), words & _holder_sets.MASK
    assert masks.all(), "a holder without a tier"
    assert len(holders) == 0 or holders.max() < len(rows), "an id never handed out"
    kept = masks & rows[holders, _KEEP]
    mixed = _mix(blocks)
    recount = np.zeros((2 * TIERS, len(rows)), np.uint64)
    for tier in range(TIERS):
        chosen = (kept >> np.uint64(tier) & np.uint64(1)).astype(np.bool_)
        recount[tier] = np.bincount(holders[chosen], minlength=len(rows))
        np.bitwise_xor.at(recount[TIERS + tier], holders[chosen], mixed[chosen])
    assert np.array_equal(rows[:, _SUMMARY], recount.T), "counts and digests"
    left = np.zeros(len(rows), np.int64)
    np.add.at(left, holders, _BITS[masks ^ kept])
    assert np.array_equal(rows[:, _LEFT_OVER], left), "left over"


def _check_ids(holders: Holders) -> None:
    """Check that every allocated id is shown, staged, retired or free, with matching masks."""
    named, staged, free = holders.ids, set(holders.staged.values()), set(holders.free)
    retired = holders.unswept - set(named.values())
    ids = [*named.values(), *holders.staged.values(), *retired, *holders.free]
    assert sorted(ids) == list(range(holders.next_id)), "ids"
    assert all(holders.rank_of[holder] == rank for rank, holder in named.items()), "names"
    for holder, row in enumerate(holders.rows[: holders.next_id].tolist()):
        visible, keep, is_unswept = row[_VISIBLE], row[_KEEP], holder in holders.unswept
        assert is_unswept == bool(row[_LEFT_OVER]), "left over, and not to be swept"
        if holder in staged:
            assert (visible, keep) == (0, _ALL), "staged"
        elif holder in retired or holder in free:
            assert visible == keep == 0, "retired"
        else:
            assert visible == keep
            assert (keep == _ALL) != is_unswept, "a tier cleared and swept"
            assert keep, "nothing kept by a rank's holder"
        if row[_FORCED_OPEN] or is_unswept or not visible:
            assert not row[_CLOSED], "trusted to have no holes"


def _ranges(starts: Integers, lengths: Integers) -> Integers:
    """Return the ranges with these starts and lengths, concatenated."""
    begins = np.cumsum(lengths) - lengths
    ranges: Integers = np.arange(int(lengths.sum())) + np.repeat(starts - begins, lengths)
    return ranges


def _mix(words: Words) -> Words:
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in _MIX_STEPS:
        mixed = (mixed ^ (mixed >> shift)) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
