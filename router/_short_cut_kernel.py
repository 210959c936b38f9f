"""Kernel that places a prompt, from its tokens to the cheapest of the candidates, for `short_cut`.

    tokens ─▶ hashes ─▶ matches ─▶ terms ─▶ costs ─▶ cheapest

Each step is the kernel that takes it on the general way.
"""

import numpy as np
import numpy.typing as npt

from router.compiled import kernel
from router.indexer._kernel import find
from router.indexer._sets import ENDS_COLUMNS, tree_at
from router.scheduler._gather import gather
from router.scheduler._pick_kernel import cheapest
from router.scheduler._predictive_kernel import COST_S, PARTS, predictive
from router.sequence._hash_kernel import prompt_hashes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@kernel(
    "UniTuple(int64, 3)(int64, Array(uint32, 1, 'C', readonly=True, aligned=False), int64, int64,"
    " uint64, Array(uint64, 1, 'C'), float64[:, ::1], int64[::1], int64[::1], int64[::1],"
    " float64[:, ::1], float64[::1], float64, float64, float64[::1], float64[:, ::1], float64[::1])"
)
def place(
    tree_address: int,
    tokens: npt.NDArray[np.uint32],
    block_size: int,
    window: int,
    seed: int,
    hashes: npt.NDArray[np.uint64],
    ranks: Floats,
    slots: Ints,
    positions: Ints,
    slot_of: Ints,
    overlaps: Floats,
    depths: Floats,
    expected_output_tokens: float,
    now_s: float,
    weights: Floats,
    terms: Floats,
    costs: Floats,
) -> tuple[int, int, int]:
    """Write hashes, terms and costs. The first of the cheapest, how many cost the same, and how
    many matches the tree has written.

    `weights`: of others' delay, and of blocks on host, disk and remote. The rest as in `gather`.
    """
    prompt_hashes(tokens, block_size, window, seed, hashes)
    rows = find(tree_address, hashes)
    matches = tree_at(tree_address).ends[: rows * ENDS_COLUMNS].reshape(rows, ENDS_COLUMNS)
    isl_tokens = len(tokens)
    total_blocks = -(-isl_tokens // block_size)
    gather(
        ranks, slots, positions, matches, slot_of, overlaps, depths, total_blocks, isl_tokens, terms
    )
    parts = np.empty((len(costs), PARTS))
    predictive(
        terms,
        isl_tokens,
        expected_output_tokens,
        now_s,
        weights[0],
        weights[1],
        weights[2],
        weights[3],
        parts,
    )
    for i in range(len(costs)):
        costs[i] = parts[i, COST_S]
    first, ties = cheapest(costs)
    return first, ties, rows
