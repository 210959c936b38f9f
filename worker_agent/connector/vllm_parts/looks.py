"""Questions to the workers: what does the store that they share have of a prompt?

Others store there, too, so that nobody knows without asking. A prompt waits for the answer, but not
for long.
"""

from collections.abc import Sequence
from itertools import count

from msgspec import Struct

from worker_agent.blocks.names import BlockName
from worker_agent.connector.vllm_parts.messages import Look

LOOK_S = 1.0
"""So long a prompt waits."""
MAX_BLOCKS = 4096
"""Asked for at once; a longer prompt is loaded as far as that."""


class _Asked(Struct):
    key: str
    until_s: float
    missing_ranks: set[int]


class Looks:
    """At most one for each request. All calls O(ranks), or O(blocks asked for)."""

    __slots__ = ("_asked", "_count", "_numbers", "_ranks", "_told", "late")

    def __init__(self, num_ranks: int) -> None:
        self.late = 0
        """Not answered in time."""
        self._count = count(1)
        self._ranks = range(num_ranks)
        self._asked: dict[int, _Asked] = {}
        self._numbers: dict[str, int] = {}
        self._told: list[Look] = []

    def ask(self, key: str, names: Sequence[BlockName], now_s: float) -> bool:
        """Whether to wait for an answer; False where one has come, or has not for too long."""
        if key in self._numbers:
            return self._is_open(self._numbers[key], now_s)
        number = self._numbers[key] = next(self._count)
        self._asked[number] = _Asked(key, now_s + LOOK_S, set(self._ranks))
        self._told.append(Look(number, tuple(names[:MAX_BLOCKS])))
        return True

    def take(self) -> list[Look]:
        """What the workers are to be told."""
        told, self._told = self._told, []
        return told

    def answered(self, rank: int, numbers: Sequence[int]) -> None:
        """A worker has looked; what it found, it told."""
        for number in numbers:
            asked = self._asked.get(number)
            if asked is not None:
                asked.missing_ranks.discard(rank)

    def forget(self, key: str) -> None:
        """Nobody waits; it may be asked anew."""
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
