"""Prompts that ranks were busy with until a moment ago: their caches may have more of them than
their events have told yet.
"""

from typing import TypeAlias

import numpy as np
from msgspec import Struct

from router.protocol.values import HashArray, Rank

RECENT_S = 0.1
"""How long events may take without anybody minding."""

MAX_ENDS = 16
"""Of a rank; of more, the oldest are forgotten."""


class End(Struct, frozen=True, eq=False):
    """A request ended, and these are its blocks."""

    ended_s: float
    sequence_hashes: HashArray


Ends: TypeAlias = tuple[End, ...]
"""Oldest first."""


class RecentEnds:
    """Ends by rank. What is taken never changes, and costs nothing to keep for a while."""

    __slots__ = ("_by_rank",)

    def __init__(self) -> None:
        self._by_rank: dict[Rank, Ends] = {}

    def note(self, rank: Rank, sequence_hashes: HashArray, now_s: float) -> None:
        """A request of a rank ended. O(ends of the rank)."""
        ends = self._by_rank.get(rank, ())[1 - MAX_ENDS :]
        self._by_rank[rank] = (*ends, End(now_s, sequence_hashes))

    def of(self, rank: Rank) -> Ends:
        """Those of a rank, some of them longer ago."""
        return self._by_rank.get(rank, ())

    def forget(self, rank: Rank) -> None:
        """The rank is gone."""
        self._by_rank.pop(rank, None)

    def expire(self, now_s: float) -> None:
        """Forget those of long ago. O(ranks with any)."""
        old = [rank for rank, ends in self._by_rank.items() if ends[-1].ended_s < now_s - RECENT_S]
        for rank in old:
            del self._by_rank[rank]


def shared_blocks(ends: Ends, sequence_hashes: HashArray, since_s: float) -> int:
    """Leading blocks of a prompt that one of these had, of those that ended since then. O(blocks
    of all).
    """
    most = 0
    for end in ends:
        if end.ended_s >= since_s:
            blocks = min(len(end.sequence_hashes), len(sequence_hashes))
            differ = end.sequence_hashes[:blocks] != sequence_hashes[:blocks]
            most = max(most, int(np.argmax(differ)) if differ.any() else blocks)
    return most
