"""A table with one row of numbers per rank, so that decisions read columns and create no objects.

Each column has one writer; every component may read. A row is reused after its rank is removed, and
is all zeros in between.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from router.protocol.values import Rank

# Properties of the worker, written by the core.
BLOCK_SIZE = 0  # tokens
EAGLE = 1  # 1: the engine drops one block of the reusable ones
CAPACITY_BLOCKS = 2  # 0: unknown; likewise for the next column
MAX_BATCHED_TOKENS = 3
HELD_BLOCKS = 4  # blocks in the index, counted once per tier
TRUST_WEIGHT = 5  # weight of a block of overlap in predictions, 0 to 1

# Booked load, written by the tracker.
PREFILL_TOKENS = 6  # uncached tokens of prompts not reported complete
QUEUED_TOKENS = 7  # of these, tokens of prompts not assumed complete
QUEUED_CONTEXTS = 8  # Σ n · (cached + n / 2) over the queued prompts: their attention work
HEAD_TOKENS = 9  # the head prompt's share of the two, and the time when it became the head
HEAD_CONTEXTS = 10
HEAD_SINCE_S = 11
DECODE_BLOCKS = 12  # blocks of all requests, shared ones counted once
REQUESTS = 13
DECODING_REQUESTS = 14  # requests with a complete prompt; next: their tokens, output included
DECODING_KV_TOKENS = 15

# Engine reports and rates, written by the predictor.
FOREIGN_TOKENS = 16  # tokens left of requests from other sources, and the number of those
FOREIGN_REQUESTS = 17
BASE_S = (
    18  # seconds a step; a prompt token; a token · context; a request and step; a token and step
)
PREFILL_S = 19
CONTEXT_S = 20
DECODE_S = 21
KV_S = 22
CHUNK_TOKENS = 23  # limit of tokens per step
RELATIVE_ERROR = 24  # standard error of the predictions beside other ranks', as a fraction
SLOW_UNTIL_S = 25  # end of a new rank's slow start, when it counts for more than predicted

# Properties of the worker, continued.
DECODE_SIDE = 26  # 1: the worker only decodes

# Engine reports, continued: averages of the last minute.
REQUESTS_PER_S = 27  # received by the engine, from all sources
PREFILL_SHARE = 28  # fraction of its time spent on prefill, 0 to below 1
OUTPUT_TOKENS = 29  # generated per request, on average
REUSE = 30  # prompt tokens found cached per computed one

# Busy state, written by the core and by the gate.
USED_BLOCKS = 31  # of its capacity, as the engine reports; 0 without reports
BUSY = 32  # 1: above a threshold, and not yet below its hysteresis band

# Booked load, continued.
GROWING_REQUESTS = 33  # decoding requests that are reported in batches
GROWING_SINCE_S = 34  # sum of the times of their last reports

# Engine rates, continued.
RATE_ERROR = 35  # standard error of the predictions themselves, as a fraction: large until learned

BURSTS = 36  # separate bursts of work by which the rank's rates were measured, in this life

# Placements, written by the core.
PLACED_AT = 37  # number of its scope's placements at the last one on this rank

# Promises, written by the tracker.
PROMISED_TOKENS_PER_S = 38  # Σ 1 / time per output token promised to requests booked here

# Prompts, written by the tracker: sums over all reported complete.
COMPLETED_TOKENS = 39  # computed for them
COMPLETED_CONTEXTS = 40  # their attention work

# Properties of the model, written by the core.
HYBRID = 41  # 1: its engine keeps parts of prompts only (`router.protocol.hybrid`)

RANK_COLUMNS = 42

TRAFFIC_MEMORY_S = 60.0
"""Time constant of the averages in `REQUESTS_PER_S` to `REUSE`."""

FIRST_CAPACITY = 16


class RankTable:
    """A table with one row per rank. Growth replaces `values`: do not keep a reference.

    `slot` returns the slot of a known rank; `find` that of any rank, or None if it is unknown.
    `version` counts changes of the assignment of slots. Invariants: no two ranks share a slot; a
    free slot's row is all zeros.
    """

    __slots__ = ("_free", "_slots", "find", "slot", "values", "version")

    def __init__(self) -> None:
        self._slots: dict[Rank, int] = {}
        self.slot = self._slots.__getitem__
        self.find = self._slots.get
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
        """Return the slot of a rank, adding the rank if it is new. Amortised O(1)."""
        slot = self._slots.get(rank)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slots[rank] = self._free.pop()
            self.version += 1
        return slot

    def drop(self, rank: Rank) -> None:
        """Remove a rank. Has no effect if it is unknown."""
        slot = self._slots.pop(rank, None)
        if slot is not None:
            self.values[slot] = 0.0
            self._free.append(slot)
            self.version += 1

    def row(self, rank: Rank) -> npt.NDArray[np.float64]:
        """Return the row of a known rank, to read and write until the next `add`."""
        row: npt.NDArray[np.float64] = self.values[self._slots[rank]]
        return row

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
