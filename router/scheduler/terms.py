"""The terms of one decision: a row per candidate, a column per quantity.

First come the columns of `router.sequence.rank_table`, as of that moment, then those of this
request. DECODE_BLOCKS is NaN where blocks are not tracked.
"""

from collections.abc import Sequence
from math import inf, isnan
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.values import Rank, Scope
from router.scheduler.herd import ALONE, ExpectedLoad
from router.sequence.active.footprint import reusable_blocks
from router.sequence.rank_table import (
    BLOCK_SIZE,
    DECODE_BLOCKS,
    EAGLE,
    HELD_BLOCKS,
    PREFILL_TOKENS,
    RANK_COLUMNS,
)

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

OVERLAP_DEVICE = RANK_COLUMNS  # leading blocks held, raw; cumulative: host is device or host
OVERLAP_HOST = RANK_COLUMNS + 1
OVERLAP_DISK = RANK_COLUMNS + 2
OVERLAP_REMOTE = RANK_COLUMNS + 3
CACHED_BLOCKS = RANK_COLUMNS + 4  # part of OVERLAP_DEVICE that the engine will reuse, by its rule
NEW_BLOCKS = RANK_COLUMNS + 5  # blocks of the request that no booked request has there
TAINT_FACTOR = RANK_COLUMNS + 6  # cost factor of preferred taints; 1 without any

COLUMNS = RANK_COLUMNS + 7


NO_PARTS: FloatArray = np.empty((0, 4))
"""The argument for kernels if the parts of costs are not needed."""

NO_SLOTS: IntArray = np.empty(0, np.int64)
"""The slots of candidates that are not in a rank table."""


class Terms(Struct, frozen=True, gc=False):
    """One candidate's terms, by name, for explanations.

    `predicted_cached_blocks`: blocks that the engine will not compute, from any of its tiers.
    `potential_*` include the request as if it were placed there; `held_blocks` is the size of the
    rank's cache.
    """

    rank: Rank
    block_size: int
    overlap_blocks: int
    predicted_cached_blocks: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    held_blocks: int


class TermTable(Struct, frozen=True, eq=False, gc=False):
    """All candidates of one decision, of one scope, in order of rank.

    `values`: shape (candidates, COLUMNS), C-contiguous, in order of `ranks`; `isl_tokens`: length
    of the prompt; `expected_output_tokens`: the caller's estimate, if any; `now_s`: time of the
    decision. `claims`: the placements expected of other routers at that time. `slots`: of the
    ranks, to be compared with the claims. `costs`, if they came with the terms, are those of the
    policy `predictive`, with the `first` of the cheapest candidates; the `ties` that cost at most
    `most` are as good. `most_ttft_s`, `most_tpot_s`: the request's objectives, in predicted
    seconds; infinite without one.
    """

    scope: Scope
    ranks: Sequence[Rank]
    values: FloatArray
    isl_tokens: int
    expected_output_tokens: int | None
    now_s: float
    claims: ExpectedLoad = ALONE
    costs: FloatArray | None = None
    first: int = 0
    ties: int = 0
    most: float = 0.0
    slots: IntArray = NO_SLOTS
    most_ttft_s: float = inf
    most_tpot_s: float = inf

    def __len__(self) -> int:
        return len(self.ranks)

    def find(self, rank: Rank | None) -> int | None:
        """Return the position of a rank; None if it is no candidate."""
        return next((i for i, each in enumerate(self.ranks) if each == rank), None)

    def column(self, column: int) -> FloatArray:
        """Return a view of one quantity of every candidate."""
        return self.values[:, column]

    def terms(self, index: int) -> Terms:
        """Return one candidate's terms."""
        row = self.values[index].tolist()
        block_size, overlap_blocks = int(row[BLOCK_SIZE]), int(row[OVERLAP_DEVICE])
        prefill_tokens = max(self.isl_tokens - overlap_blocks * block_size, 0)
        return Terms(
            rank=self.ranks[index],
            block_size=block_size,
            overlap_blocks=overlap_blocks,
            predicted_cached_blocks=reusable_blocks(
                self.isl_tokens, block_size, int(row[OVERLAP_REMOTE]), eagle=bool(row[EAGLE])
            ),
            potential_prefill_tokens=int(row[PREFILL_TOKENS]) + prefill_tokens,
            potential_decode_blocks=potential_decode_blocks(row),
            held_blocks=int(row[HELD_BLOCKS]),
        )


def potential_decode_blocks(row: Sequence[float]) -> int:
    """Return the blocks in use, including the request, of a row; 0 if they are not tracked."""
    blocks = row[DECODE_BLOCKS] + row[NEW_BLOCKS]
    return 0 if isnan(blocks) else int(blocks)
