"""What routers that cannot know of each other yet leave to each other."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.values import Rank


class Unspread(Struct, frozen=True):
    """A booking of ours that others may not know of: tokens to compute, n · (cached + n / 2)."""

    booked_s: float
    rank: Rank
    tokens: int
    contexts: float


class Claims(Struct, frozen=True, eq=False):
    """Requests that other routers are expected to place at this moment.

    `turns`: how likely each is, in the order in which routers take ranks; 0 is a turn of our own.
    `tokens`, `contexts`, `isl_tokens`: of a usual request, computed and whole. `ours`: what the
    others do not see when they choose.
    """

    turns: npt.NDArray[np.float64]
    tokens: float
    contexts: float
    isl_tokens: float
    ours: Sequence[Unspread]

    def __bool__(self) -> bool:
        return len(self.turns) > 0

    def unseen(self, ranks: Sequence[Rank]) -> npt.NDArray[np.float64]:
        """Rows {position, tokens, contexts, booked} of `ours` among these ranks, in order."""
        rows = []
        for each in self.ours:
            position = bisect_left(ranks, each.rank)
            if position < len(ranks) and ranks[position] == each.rank:
                rows.append((position, each.tokens, each.contexts, each.booked_s))
        return np.array(rows).reshape(-1, 4)


NO_CLAIMS = Claims(np.empty(0), 0.0, 0.0, 0.0, ())
"""Of other routers that are there, but not expected to place anything just now."""
