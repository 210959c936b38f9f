"""Numbers about every rank, one row each, so that a decision reads columns and makes no objects.

A column has one writer, who keeps it true; everybody reads. A row is used again after its rank is
gone, and is all zeros in between.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from router.protocol.values import Rank

# Of its worker, written by the core.
BLOCK_SIZE = 0  # tokens
EAGLE = 1  # 1: the engine drops one block of what it could reuse
CAPACITY_BLOCKS = 2  # 0: not known, as the next
MAX_BATCHED_TOKENS = 3
HELD_BLOCKS = 4  # in the index, once a tier
TRUST_WEIGHT = 5  # what a block of overlap counts for in predictions, 0 to 1

# Of what is booked there, written by the tracker.
PREFILL_TOKENS = 6  # not cached, of prompts that nobody said are complete
QUEUED_TOKENS = 7  # the same without those that seem to be
QUEUED_CONTEXTS = 8  # Σ n · (cached + n / 2) over these: their attention work
HEAD_TOKENS = 9  # the oldest such prompt's part of these two, and since when it is the oldest
HEAD_CONTEXTS = 10
HEAD_SINCE_S = 11
DECODE_BLOCKS = 12  # blocks of all requests, shared ones once
REQUESTS = 13
DECODING_REQUESTS = 14  # those whose prompt seems to be complete, and their tokens, output included
DECODING_KV_TOKENS = 15

# Of what its engine reports, written by the predictor.
FOREIGN_TOKENS = 16  # left to compute for others than us, and how many requests those are
FOREIGN_REQUESTS = 17
BASE_S = (
    18  # seconds a step; a prompt token; a token · context; a request and step; a token and step
)
PREFILL_S = 19
CONTEXT_S = 20
DECODE_S = 21
KV_S = 22
CHUNK_TOKENS = 23  # a step computes at most
RELATIVE_ERROR = 24  # standard error of what these predict, as a fraction
SLOW_UNTIL_S = 25  # a rank that is new counts for more than predicted until then

# Of its worker again.
DECODE_SIDE = 26  # 1: its worker decodes only

# Of what its engine reports, again.
REQUESTS_PER_S = 27  # that it receives, from whomever
PREFILL_SHARE = 28  # of its time that goes into prompts, 0 to below 1
OUTPUT_TOKENS = 29  # that a request of its generates, on average
REUSE = 30  # prompt tokens found cached for each one computed

# Of whether it may have more, written by the core and by the gate.
USED_BLOCKS = 31  # of its capacity, as its engine says; 0 where that is silent
BUSY = 32  # 1: above a threshold, and not yet below its band

# Of what is booked there, again.
GROWING_REQUESTS = 33  # decoding ones that are reported in batches
GROWING_SINCE_S = 34  # when each was last spoken of, summed

RANK_COLUMNS = 35

FIRST_CAPACITY = 16


class RankTable:
    """One row a rank. Growing replaces `values`: read it anew each time.

    `version` counts changes of who has which slot. Invariants: no two ranks share a slot; a free
    slot's row is all zeros.
    """

    __slots__ = ("_free", "_slots", "values", "version")

    def __init__(self) -> None:
        self._slots: dict[Rank, int] = {}
        self._free: list[int] = []
        self.version = 0
        self.values: npt.NDArray[np.float64] = np.zeros((0, RANK_COLUMNS))

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._slots)

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._slots

    def add(self, rank: Rank) -> int:
        """The slot of a rank, which may be new. Amortised O(1)."""
        slot = self._slots.get(rank)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slots[rank] = self._free.pop()
            self.version += 1
        return slot

    def drop(self, rank: Rank) -> None:
        """Forget a rank; unknown ones are passed over."""
        slot = self._slots.pop(rank, None)
        if slot is not None:
            self.values[slot] = 0.0
            self._free.append(slot)
            self.version += 1

    def slot(self, rank: Rank) -> int:
        """The row of a known rank."""
        return self._slots[rank]

    def row(self, rank: Rank) -> npt.NDArray[np.float64]:
        """The numbers of a known rank, to read and write until the next `add`."""
        row: npt.NDArray[np.float64] = self.values[self._slots[rank]]
        return row

    def find(self, rank: Rank) -> int | None:
        """The row of a rank, if there is one."""
        return self._slots.get(rank)

    def check_invariants(self) -> None:
        """Assert the invariants in the class's docstring. O(ranks)."""
        taken = list(self._slots.values())
        assert sorted([*taken, *self._free]) == list(range(len(self.values)))
        assert not self.values[np.array(self._free, dtype=int)].any()

    def _grow(self) -> None:
        before = len(self.values)
        grown = np.zeros((max(2 * before, FIRST_CAPACITY), RANK_COLUMNS))
        grown[:before] = self.values
        self.values = grown
        self._free.extend(range(len(grown) - 1, before - 1, -1))
