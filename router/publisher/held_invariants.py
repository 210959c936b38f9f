"""What always holds of a rank's held blocks, recounted in plain Python."""

import numpy as np

from router.fresh_memory import FormerTable
from router.protocol.values import FASTEST_TIER, TIERS, U64_MAX, HashArray, Tier
from router.publisher import _held_table as t
from router.sequence.digest import digest

_SLOT_WORDS = int(t.SLOT_WORDS)
_FLAGS, _PARENT, _CHILDREN, _KEY = (int(w) for w in (t.FLAGS, t.PARENT, t.CHILDREN, t.KEY))


def check_held(
    header: HashArray, present: HashArray, former: FormerTable[np.uint64] | None
) -> None:
    """Assert that places, children, holes, counts and digests are what the slots say."""
    tables = [(t.PRESENT, _rows(present))]
    if header[t.MOVED] != t.ALL:
        assert former is not None
        tables.append((t.FORMER, former.slots.tolist()))
    rows = [row for _, slots in tables for row in slots if row[_FLAGS]]
    assert len(rows) == header[t.USED] <= header[t.MAX_USED]
    by_key = {row[_KEY]: row for row in rows}
    assert len(by_key) == len(rows)
    for number, slots in tables:
        _check_places(header, int(number), slots)
    _check_sums(header, by_key)


def _rows(slots: HashArray) -> list[list[int]]:
    rows: list[list[int]] = slots.reshape(-1, _SLOT_WORDS).tolist()
    return rows


def _check_places(header: HashArray, table: int, slots: list[list[int]]) -> None:
    """Each key is in the table that its home has not moved from, and behind no gap."""
    shift, multiplier = int(header[table + int(t.SHIFT)]), int(header[t.MULTIPLIER])
    for position, row in enumerate(slots):
        if row[_FLAGS]:
            spread = row[_KEY] * multiplier & U64_MAX
            assert _table_of(header, spread) == table
            home = spread >> shift
            while home != position:
                assert slots[home][_FLAGS]
                home = (home + 1) % len(slots)


def _table_of(header: HashArray, spread: int) -> int:
    former, moved = int(t.FORMER), int(header[t.MOVED])
    if moved == int(t.ALL):
        return int(t.PRESENT)
    home = spread >> int(header[former + int(t.SHIFT)])
    distance = (home - int(header[t.START])) & int(header[former + int(t.LAST)])
    return former if distance >= moved else int(t.PRESENT)


def _check_sums(header: HashArray, rows: dict[int, list[int]]) -> None:
    fastest = {key: FASTEST_TIER[row[_FLAGS] & int(t.MASK)] for key, row in rows.items()}
    children = {key: [0] * TIERS for key in rows}
    holes = [0] * TIERS
    for key, row in rows.items():
        if fastest[key] < TIERS and row[_FLAGS] & int(t.HAS_PARENT):
            children[row[_PARENT]][fastest[key]] += 1
            for hole in range(fastest[key], fastest[row[_PARENT]]):
                holes[hole] += 1
    for key, row in rows.items():
        words = np.array(row[_CHILDREN:_FLAGS], np.uint64)
        assert words.view(np.uint32).tolist() == children[key]
        assert fastest[key] < TIERS or any(children[key])
    assert holes == _per_tier(header, t.HOLES)
    for tier in Tier:
        held = [key for key, row in rows.items() if row[_FLAGS] >> tier & 1]
        assert len(held) == _per_tier(header, t.COUNTS)[tier]
        assert digest(np.array(held, np.uint64)) == _per_tier(header, t.DIGESTS)[tier]


def _per_tier(header: HashArray, first: np.uint64) -> list[int]:
    words: list[int] = header[int(first) : int(first) + TIERS].tolist()
    return words
