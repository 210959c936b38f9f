"""Resolution of an event's blocks to sequence hashes, before anything changes; for kernels."""

import numpy as np

from router.publisher.normalizer._map_counts import forget
from router.publisher.normalizer._map_rows import (
    BURIED,
    META,
    NAMED,
    NOWHERE,
    SEQUENCE,
    EngineRows,
    fetch,
    find,
)
from router.runtime.kernels._growing_table import Words
from router.runtime.kernels.numba_runtime import device
from router.sequence.hashing._hash_kernel import chained

_0 = np.uint64(0)
_1 = np.uint64(1)
_LOW = np.uint64(0xFFFFFFFF)
_FEW = 24
_MIX = np.uint64(0xBF58476D1CE4E5B9)


@device
def _many_have_duplicates(hashes: Words) -> bool:
    bits = _1
    while (_1 << bits) < np.uint64(2 * len(hashes)):
        bits += _1
    last = (_1 << bits) - _1
    seen = np.zeros(np.int64(last) + 1, np.uint32)
    for i in range(len(hashes)):
        position = (hashes[i] * _MIX) >> (np.uint64(64) - bits)
        while seen[position]:
            if hashes[seen[position] - np.uint32(1)] == hashes[i]:
                return True
            position = (position + _1) & last
        seen[position] = np.uint32(i + 1)
    return False


@device
def has_duplicates(hashes: Words) -> bool:
    """Return whether a hash occurs twice.

    Few hashes are compared with each other, many are looked up in a hash table.
    """
    if len(hashes) > _FEW:
        return _many_have_duplicates(hashes)
    for i in range(len(hashes)):
        for j in range(i):
            if hashes[i] == hashes[j]:
                return True
    return False


@device
def resolve(
    m: EngineRows,
    hashes: Words,
    group: np.uint64,
    parent: np.uint64,
    context: np.uint64,
    names: Words,
    found: Words,
) -> bool:
    """Turn local hashes into sequence hashes, and write the rows that exist to `found`.

    Returns False on a conflict. A retired row that now has another sequence hash is forgotten. A
    held row that was named in another context keeps its sequence hash, and the hashes of the blocks
    after it are chained to that.
    """
    is_root = parent == NOWHERE
    before = _0 if is_root else m.rows[parent + SEQUENCE]
    for i in range(len(hashes)):
        fetch(m, hashes, group, i)
        before = names[i] if is_root and i == 0 else chained(before, names[i])
        row = find(m, hashes[i] ^ group)
        if row != NOWHERE and m.rows[row + META] & NAMED and m.rows[row + SEQUENCE] != before:
            if m.rows[row + META] & BURIED:
                forget(m, row)
                row = NOWHERE
            elif m.rows[row + META] & _LOW == context:
                return False
            else:
                before = m.rows[row + SEQUENCE]
        names[i] = before
        found[i] = row
    return True
