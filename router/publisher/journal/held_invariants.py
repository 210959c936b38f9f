"""The invariants of a rank's held blocks, recounted in plain Python."""

import numpy as np

from router.protocol.values import FASTEST_TIER, TIERS, HashArray, Tier
from router.publisher.journal import _held_table as t
from router.runtime.kernels.growing_table import GrowingTable
from router.sequence.hashing._digest import digest

_FLAGS, _PARENT, _CHILDREN, _KEY = (int(w) for w in (t.FLAGS, t.PARENT, t.CHILDREN, t.KEY))


def check_held(header: HashArray, table: GrowingTable) -> None:
    """Assert that places, children, holes, counts and digests agree with the slots."""
    table.check_places(int(header[t.MULTIPLIER]))
    rows = table.used_slots().tolist()
    assert len(rows) == header[t.USED] <= header[t.MAX_USED]
    by_key = {row[_KEY]: row for row in rows}
    assert len(by_key) == len(rows)
    _check_sums(header, by_key)


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
