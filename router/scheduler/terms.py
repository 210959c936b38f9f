"""What one decision is made from: a row a candidate, a column a quantity.

The columns of `router.sequence.rank_table` come first, as they were at that moment, then those that
are of this request. DECODE_BLOCKS is NaN where blocks are not tracked.
"""

from collections.abc import Sequence
from math import isnan
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.values import Rank, Scope
from router.scheduler.claims import Claims
from router.sequence.footprint import reusable_blocks
from router.sequence.rank_table import (
    BLOCK_SIZE,
    DECODE_BLOCKS,
    EAGLE,
    HELD_BLOCKS,
    PREFILL_TOKENS,
    RANK_COLUMNS,
)

FloatArray: TypeAlias = npt.NDArray[np.float64]

OVERLAP_DEVICE = RANK_COLUMNS  # leading blocks held, raw; cumulative: host is device or host
OVERLAP_HOST = RANK_COLUMNS + 1
OVERLAP_DISK = RANK_COLUMNS + 2
OVERLAP_REMOTE = RANK_COLUMNS + 3
CACHED_BLOCKS = RANK_COLUMNS + 4  # what of OVERLAP_DEVICE the engine will reuse, by its own rule
NEW_BLOCKS = RANK_COLUMNS + 5  # blocks of the request that nobody has booked there
TAINT_FACTOR = RANK_COLUMNS + 6  # of preferred taints: a cost is multiplied by it; 1 without any

COLUMNS = RANK_COLUMNS + 7


NO_PARTS: FloatArray = np.empty((0, 4))
"""For kernels that nobody asks what costs are the sum of."""


class Terms(Struct, frozen=True):
    """One candidate's terms, by name, for explanations.

    `predicted_cached_blocks`: what the engine will not compute, from whichever of its tiers.
    `potential_*` count the request as if it were already there; `held_blocks` is the size of the
    rank's cache.
    """

    rank: Rank
    block_size: int
    overlap_blocks: int
    predicted_cached_blocks: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    held_blocks: int


class TermTable(Struct, frozen=True, eq=False):
    """All candidates of one decision, of one scope, in order of rank.

    `values`: shape (candidates, COLUMNS), C-contiguous, in order of `ranks`;
    `isl_tokens` is the prompt's length, `expected_output_tokens` what its caller expects, if
    anything; `now_s` is the moment of the decision. `claims`: what other routers are expected to
    place at that moment; None: there are none.
    """

    scope: Scope
    ranks: Sequence[Rank]
    values: FloatArray
    isl_tokens: int
    expected_output_tokens: int | None
    now_s: float
    claims: Claims | None = None

    def __len__(self) -> int:
        return len(self.ranks)

    def find(self, rank: Rank | None) -> int | None:
        """Which candidate a rank is; None: none."""
        return next((i for i, each in enumerate(self.ranks) if each == rank), None)

    def column(self, column: int) -> FloatArray:
        """One quantity of every candidate; a view."""
        return self.values[:, column]

    def terms(self, index: int) -> Terms:
        """One candidate's terms."""
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
    """Blocks in use with the request there, of a candidate's row; 0 where they are not tracked."""
    blocks = row[DECODE_BLOCKS] + row[NEW_BLOCKS]
    return 0 if isnan(blocks) else int(blocks)
