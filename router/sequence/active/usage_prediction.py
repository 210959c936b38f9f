"""The prediction for a booked request, to be compared with the usage that its engine reports.

Recently ended prompts of a rank may be in its cache before its events report them.
"""

from typing import TypeAlias

import numpy as np
from msgspec import Struct

from router.protocol.values import HashArray, Rank
from router.sequence.active.footprint import Footprint

RECENT_S = 0.1
"""The time that events may take without loss of accuracy."""

MAX_ENDS = 16
"""The limit of ends kept per rank; beyond it, the oldest are dropped."""


class Completion(Struct, frozen=True, eq=False):
    """An ended request and its blocks."""

    ended_s: float
    sequence_hashes: HashArray


Ends: TypeAlias = tuple[Completion, ...]
"""Ended requests, oldest first."""


class RecentCompletions:
    """Recently ended requests by rank, in `by_rank`; some may be older than RECENT_S."""

    __slots__ = ("by_rank",)

    def __init__(self) -> None:
        self.by_rank: dict[Rank, Ends] = {}

    def note(self, rank: Rank, sequence_hashes: HashArray, now_s: float) -> None:
        """Record the end of a request on a rank. O(ends of the rank)."""
        ends = self.by_rank.get(rank, ())[1 - MAX_ENDS :]
        self.by_rank[rank] = (*ends, Completion(now_s, sequence_hashes))

    def forget(self, rank: Rank) -> None:
        """Drop the ends of a removed rank."""
        self.by_rank.pop(rank, None)

    def expire(self, now_s: float) -> None:
        """Drop the ranks without ends of the last RECENT_S. O(ranks with ends)."""
        old = [rank for rank, ends in self.by_rank.items() if ends[-1].ended_s < now_s - RECENT_S]
        for rank in old:
            del self.by_rank[rank]


def shared_blocks(ends: Ends, sequence_hashes: HashArray, since_s: float) -> int:
    """Return the most leading blocks shared with a prompt that ended at or after `since_s`.

    O(blocks of all ends).
    """
    most = 0
    for end in ends:
        if end.ended_s >= since_s:
            blocks = min(len(end.sequence_hashes), len(sequence_hashes))
            differ = end.sequence_hashes[:blocks] != sequence_hashes[:blocks]
            most = max(most, int(np.argmax(differ)) if differ.any() else blocks)
    return most


class Prediction(Struct, frozen=True, eq=False):
    """The prediction for a booked request, as far as its engine's usage can be compared with it.

    At the time of booking (`booked_s`), other requests on the rank held `in_flight_blocks` leading
    blocks of it; `ends`: the requests that had recently ended there.
    """

    footprint: Footprint
    in_flight_blocks: int
    ends: Ends
    booked_s: float

    @property
    def busy_blocks(self) -> int:
        """Leading blocks that other requests held then, or had just held. O(blocks of all)."""
        hashes, since_s = self.footprint.sequence_hashes, self.booked_s - RECENT_S
        return max(self.in_flight_blocks, shared_blocks(self.ends, hashes, since_s))
