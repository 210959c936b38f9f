"""The invariants of an engine map, recounted in plain numpy and Python."""

from collections import Counter

import numpy as np
import numpy.typing as npt

from router.protocol.values import TIERS, HashArray, Tier
from router.publisher.normalizer import _map_rows as r
from router.runtime.kernels.growing_table import GrowingTable

_LOW = 0xFFFFFFFF
_COPY_SHIFTS = [16 * tier for tier in range(TIERS)]


class _Row:
    __slots__ = ("children", "copies", "is_buried", "is_named", "meta", "newer", "older", "parent")

    def __init__(self, words: list[int]) -> None:
        _, _, links, held, self.meta = words
        self.parent, self.children = links & _LOW, links >> 32
        self.is_buried = bool(self.meta & int(r.BURIED))
        self.is_named = bool(self.meta & int(r.NAMED))
        self.older, self.newer = held & _LOW, held >> 32
        self.copies = [0 if self.is_buried else held >> shift & 0xFFFF for shift in _COPY_SHIFTS]


def check_rows(
    state: HashArray,
    words: npt.NDArray[np.uint64],
    slots: GrowingTable,
    uses: npt.NDArray[np.uint32],
) -> None:
    """Assert that counts, links, retired rows and slots agree with the rows. O(rows)."""
    keys = words[:, 0].tolist()
    parsed = {i + 1: _Row(row) for i, row in enumerate(words.tolist()) if row[4] & int(r.IN_USE)}
    _check_sums(state, parsed)
    _check_links(parsed)
    _check_retired_rows(state, parsed)
    _check_slots(slots, {number: keys[number - 1] for number in parsed})
    contexts = Counter(row.meta & _LOW for row in parsed.values() if row.is_named)
    used = np.flatnonzero(uses)
    assert dict(zip(used.tolist(), uses[used].tolist(), strict=True)) == dict(contexts)
    free, number = 0, int(state[r.FREE_ROW])
    while number:
        assert number not in parsed
        number, free = keys[number - 1], free + 1
    assert free + len(parsed) == int(state[r.USED_ROWS])


def names_held(words: npt.NDArray[np.uint64]) -> dict[Tier, Counter[int]]:
    """Return the number of named rows with copies in a tier, by tier and sequence hash. O(rows)."""
    held: dict[Tier, Counter[int]] = {tier: Counter() for tier in Tier}
    for words_of_row in words.tolist():
        row = _Row(words_of_row)
        for tier in Tier if row.is_named else ():
            if row.copies[tier]:
                held[tier][words_of_row[1]] += 1
    return held


def _check_sums(state: HashArray, rows: dict[int, _Row]) -> None:
    assert len(rows) == int(state[r.COUNT]) <= int(state[r.ROW_CAPACITY])
    for tier in range(TIERS):
        assert sum(row.copies[tier] for row in rows.values()) == int(state[r.COPIES + tier])
    assert all(row.is_named or any(row.copies) for row in rows.values())
    assert sum(not row.is_named for row in rows.values()) == int(state[r.ORPHANS])
    dead = sum(row.is_named and not any(row.copies) for row in rows.values())
    assert dead == int(state[r.DEAD])
    buried = sum(row.is_buried for row in rows.values())
    assert dead <= 2 * int(state[r.POOL_BLOCKS]) or not buried


def _check_links(rows: dict[int, _Row]) -> None:
    children = Counter(row.parent for row in rows.values() if row.parent)
    for number, row in rows.items():
        assert row.children == children[number]
        assert not row.parent or rows[row.parent].is_named
        is_bare = row.is_named and not row.children and not any(row.copies)
        assert row.is_buried == is_bare


def _check_retired_rows(state: HashArray, rows: dict[int, _Row]) -> None:
    seen, number, older = set(), int(state[r.OLDEST]), 0
    while number:
        assert rows[number].is_buried
        assert rows[number].older == older
        seen.add(number)
        older, number = number, rows[number].newer
    assert older == int(state[r.NEWEST])
    assert seen == {n for n, row in rows.items() if row.is_buried}


def _check_slots(slots: GrowingTable, keys: dict[int, int]) -> None:
    """Assert that every row is in one slot, which is in its place."""
    assert 4 * len(keys) <= 3 * len(slots.slots)
    slots.check_places(1)
    words = slots.used_slots().ravel().tolist()
    assert sorted(words) == sorted(r.spread_of(key) | number for number, key in keys.items())
