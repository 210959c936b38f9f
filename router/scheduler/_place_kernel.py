"""The kernel of a decision: from a prompt to the terms of its candidates, and to the cheapest.

tokens ─▶ hashes ─▶ overlaps ─▶ terms ─▶ costs ─▶ cheapest
"""

import numpy as np
import numpy.typing as npt

from router.indexer.radix_tree._holder_sets import ENDS_COLUMNS, tree_at
from router.indexer.radix_tree._resume_kernel import find_resumable
from router.protocol.values import TIERS
from router.runtime.kernels.numba_runtime import device, kernel
from router.scheduler.policy._predicted_parts import PARTS
from router.scheduler.policy._predictive_kernel import price
from router.scheduler.predictor._progress_kernel import grow
from router.scheduler.terms import CACHED_BLOCKS, NEW_BLOCKS, OVERLAP_DEVICE, TAINT_FACTOR
from router.sequence.active._booking_rows import (
    FIRST_USE,
    GROWING,
    NEXT_USE,
    PARENT,
    ROOT,
    SLOT,
    START,
    trie_at,
)
from router.sequence.active._booking_steps import reusable_blocks
from router.sequence.active._prompt_trie import begun_with, shared_way
from router.sequence.hashing._hash_kernel import prompt_hashes
from router.sequence.rank_table import (
    BLOCK_SIZE,
    DECODE_BLOCKS,
    DECODE_SIDE,
    EAGLE,
    HYBRID,
    RANK_COLUMNS,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Found = npt.NDArray[np.uint32]

NO_SLOT = -1

# What applies to a decision, added up.
IS_LAST = 1  # all candidates have their terms afterwards
COUNTS_OUTPUT = 2  # their output blocks count as load
HIDES_BLOCKS = 4  # decode blocks are not tracked
HAS_PHASE = 8  # the request names its phase
IS_DECODE = 16  # that phase is decode
SHARES_BLOCKS = 32  # blocks that booked requests hold are not new


@device
def search(
    trees: Ints, hashes: Hashes, isl_tokens: int, block_size: int, overlaps: Floats, found: Found
) -> int:
    """Write the longest overlap of each slot in any tree, and the slots with one to `found`.

    Overlaps on hybrid ranks end where the prompt can be resumed. `trees`: rows {address, slot of
    each holder or NO_SLOT}.
    """
    count = 0
    for t in range(len(trees)):
        rows = find_resumable(trees[t, 0], hashes, isl_tokens, block_size)
        ends = tree_at(trees[t, 0]).ends
        for at in range(0, rows * ENDS_COLUMNS, ENDS_COLUMNS):
            slot = trees[t, 1 + ends[at]]
            if slot == NO_SLOT or ends[at + TIERS] == 0:
                continue
            if overlaps[slot, TIERS - 1] == 0:
                found[count, 0] = slot
                count += 1
            for tier in range(TIERS):
                overlaps[slot, tier] = max(overlaps[slot, tier], float(ends[at + 1 + tier]))
    return count


@device
def write_terms(
    row: Floats, rank: Floats, overlap: Floats, isl_tokens: int, total_blocks: int, flags: int
) -> None:
    """Write the terms of one candidate, a copy of its rank's row first."""
    for column in range(RANK_COLUMNS):
        row[column] = rank[column]
    for tier in range(TIERS):
        row[OVERLAP_DEVICE + tier] = overlap[tier]
    row[CACHED_BLOCKS] = reusable_blocks(overlap[0], isl_tokens, row[BLOCK_SIZE], row[EAGLE])
    row[NEW_BLOCKS] = total_blocks
    if flags & HIDES_BLOCKS:
        row[DECODE_BLOCKS] = np.nan
    if flags & HAS_PHASE:
        row[DECODE_SIDE] = 1.0 if flags & IS_DECODE else 0.0


@device
def subtract_depths(
    bookings: Ints, hashes: Hashes, places: Ints, depths: Floats, terms: Floats
) -> None:
    """Subtract from NEW_BLOCKS the leading blocks that booked requests hold there.

    Of a booked prompt, an engine with a hybrid model leaves a checkpoint at its end alone. So there
    a prompt resumes after a booked one that it begins with, or where it can resume now: what it
    shares with others up to their middle is new. `depths`: scratch by slot, zeroed again.
    """
    trie = trie_at(bookings)
    last, shared = shared_way(trie, hashes)
    if not shared:
        return
    node, position = last, shared
    while node != ROOT:
        use = trie.nodes[node, FIRST_USE]
        while use:
            slot = trie.uses[use, SLOT]
            depths[slot] = max(depths[slot], float(position))
            use = trie.uses[use, NEXT_USE]
        position, node = trie.nodes[node, START], trie.nodes[node, PARENT]
    for i in range(len(places)):
        row, held = terms[places[i, 0]], depths[places[i, 1]]
        if row[HYBRID] and held:
            promised = float(begun_with(trie, places[i, 1], last, shared))
            held = min(held, max(row[CACHED_BLOCKS], promised))
        row[NEW_BLOCKS] -= held
    depths[:] = 0.0


@kernel(
    "Tuple((int64, int64, int64, float64))(int64[:, ::1],"
    " Array(uint32, 1, 'C', readonly=True, aligned=False), int64, int64, uint64,"
    " Array(uint64, 1, 'C'), float64[:, ::1], int64[:, ::1], float64[:, ::1], uint32[:, ::1],"
    " float64[::1], int64, float64, float64, int64, float64[::1], float64[:, ::1], float64[::1],"
    " int64[::1], Array(uint64, 1, 'C', readonly=True, aligned=False), float64[::1], int64[::1],"
    " float64[::1], float64[:, ::1])"
)
def place(
    trees: Ints,
    tokens: npt.NDArray[np.uint32],
    block_size: int,
    window: int,
    seed: int,
    hashes: Hashes,
    ranks: Floats,
    places: Ints,
    overlaps: Floats,
    found: Found,
    factors: Floats,
    isl_tokens: int,
    expected_output_tokens: float,
    now_s: float,
    flags: int,
    weights: Floats,
    terms: Floats,
    costs: Floats,
    bookings: Ints,
    load_hashes: Hashes,
    depths: Floats,
    slots: Ints,
    estimate: Floats,
    ours: Floats,
) -> tuple[int, int, int, float]:
    """Write the terms of the candidates of one identity, then the costs of all candidates.

    Returns the rows in `found`, and the result of `price`. `tokens`: of which `hashes` are
    written; empty if they are. `ranks`: the rank table. `places`: rows {position, slot} of the
    candidates. `overlaps`: scratch by slot, zeroed again. `found`: rows {slot, overlap in each
    cumulative tier}, written. `factors`: of each candidate, or empty. `costs`: written from all
    terms; empty if they are not wanted. `bookings`: the tracker's state, in which the prompt has
    `load_hashes`. `depths`: scratch by slot, zeroed again. `trees`: see `search`. The others: see
    `price`.
    """
    if len(tokens):
        prompt_hashes(tokens, block_size, window, seed, hashes)
    count = search(trees, hashes, isl_tokens, block_size, overlaps, found)
    total_blocks = -(-isl_tokens // block_size)
    for i in range(len(places)):
        position, slot = places[i, 0], places[i, 1]
        row = terms[position]
        write_terms(row, ranks[slot], overlaps[slot], isl_tokens, total_blocks, flags)
        row[TAINT_FACTOR] = factors[position] if len(factors) else 1.0
    for i in range(count):
        slot = found[i, 0]
        for tier in range(TIERS):
            found[i, 1 + tier] = np.uint32(overlaps[slot, tier])
            overlaps[slot, tier] = 0.0
    if flags & SHARES_BLOCKS:
        subtract_depths(bookings, load_hashes, places, depths, terms)
    if flags & IS_LAST and bookings[GROWING]:
        grow(terms, now_s, flags & COUNTS_OUTPUT != 0)
    if len(costs) == 0:
        return count, 0, 0, 0.0
    none = np.empty((0, PARTS))
    first, ties, most = price(
        terms,
        slots,
        isl_tokens,
        expected_output_tokens,
        now_s,
        weights,
        estimate,
        ours,
        none,
        costs,
    )
    return count, first, ties, most
