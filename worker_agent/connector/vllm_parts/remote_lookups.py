"""Lookups of prompts in the store that the workers share, made by the workers.

Other workers store blocks there too, so that its contents are unknown without a lookup. A prompt
waits for the result for at most `LOOK_S`.
"""

from collections.abc import Sequence
from itertools import count

from msgspec import Struct

from worker_agent.blocks.names import BlockName
from worker_agent.connector.vllm_parts.messages import Lookup

LOOK_S = 1.0
"""Longest time that a prompt waits for a lookup."""
MAX_BLOCKS = 4096
"""Limit of blocks in a lookup; of a longer prompt, only these leading ones are looked up."""


class _Asked(Struct):
    key: str
    until_s: float
    missing_ranks: set[int]


class RemoteLookups:
    """Lookups in progress, at most one per request. All calls are O(ranks), or O(blocks)."""

    __slots__ = ("_asked", "_count", "_numbers", "_queued", "_ranks", "late")

    def __init__(self, num_ranks: int) -> None:
        self.late = 0
        """Number of lookups that did not end in time."""
        self._count = count(1)
        self._ranks = range(num_ranks)
        self._asked: dict[int, _Asked] = {}
        self._numbers: dict[str, int] = {}
        self._queued: list[Lookup] = []

    def __contains__(self, key: str) -> bool:
        """Return whether this prompt's lookup was started."""
        return key in self._numbers

    def look_up(self, key: str, names: Sequence[BlockName], now_s: float) -> bool:
        """Return whether to wait for the lookup of a prompt; the first call starts it.

        Returns False once all workers have responded, or the time limit has passed.
        """
        if key in self._numbers:
            return self._is_open(self._numbers[key], now_s)
        number = self._numbers[key] = next(self._count)
        self._asked[number] = _Asked(key, now_s + LOOK_S, set(self._ranks))
        self._queued.append(Lookup(number, tuple(names[:MAX_BLOCKS])))
        return True

    def take(self) -> list[Lookup]:
        """Return the lookups to send to the workers."""
        queued, self._queued = self._queued, []
        return queued

    def answered(self, rank: int, numbers: Sequence[int]) -> None:
        """Record that a worker has finished lookups; the found blocks come as changes."""
        for number in numbers:
            asked = self._asked.get(number)
            if asked is not None:
                asked.missing_ranks.discard(rank)

    def forget(self, key: str) -> None:
        """Forget the lookup of a request; a later call may start a new one."""
        number = self._numbers.pop(key, None)
        if number is not None:
            self._asked.pop(number, None)

    def _is_open(self, number: int, now_s: float) -> bool:
        asked = self._asked.get(number)
        if asked is None:
            return False
        if asked.missing_ranks and now_s < asked.until_s:
            return True
        self.late += bool(asked.missing_ranks)
        del self._asked[number]
        return False
