"""Which blocks are worth a place in a slower tier.

A policy looks at a run of blocks in prompt order, and answers for each. What it counts on the way
is its own. Sources: the filters of Dynamo's offload managers, both generations.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

from worker_agent.blocks.eviction.tiny_lfu import TinyLfu
from worker_agent.offload.queue import Waiting


class OffloadPolicy(Protocol):
    """Decides for a run of blocks; may count that they were asked about."""

    def admitted(self, waiting: Sequence[Waiting], now_s: float) -> Sequence[Waiting]:
        """Those worth copying, in order."""


class PassAll:
    """Every block."""

    __slots__ = ()

    def admitted(self, waiting: Sequence[Waiting], now_s: float) -> Sequence[Waiting]:
        """All of them."""
        del now_s
        return waiting


class Presence:
    """Blocks that the target does not have. `has`: whether it does."""

    __slots__ = ("_has",)

    def __init__(self, has: Callable[[bytes], bool]) -> None:
        self._has = has

    def admitted(self, waiting: Sequence[Waiting], now_s: float) -> Sequence[Waiting]:
        """Those that are not there."""
        del now_s
        return [each for each in waiting if not self._has(each.name.identity)]


class Frequency:
    """Blocks seen a second time, while the first is not forgotten.

    A count begins at 1 and doubles with each sight; every `decay_s` all go down by one, and those
    at nothing are forgotten.
    """

    __slots__ = ("_counts", "_decay_s", "_decayed_s", "_max_counts")

    def __init__(self, decay_s: float = 600.0, max_counts: int = 1_000_000) -> None:
        self._decay_s = decay_s
        self._max_counts = max_counts
        self._counts: dict[bytes, int] = {}
        self._decayed_s: float | None = None

    def __len__(self) -> int:
        return len(self._counts)

    def admitted(self, waiting: Sequence[Waiting], now_s: float) -> Sequence[Waiting]:
        """Those seen before."""
        self._decay(now_s)
        return [each for each in waiting if self._note(each.name.identity) >= 2]

    def _note(self, identity: bytes) -> int:
        count = self._counts.pop(identity, 0)
        self._counts[identity] = count = min(count * 2, 2**16) or 1
        if len(self._counts) > self._max_counts:
            del self._counts[next(iter(self._counts))]  # not seen for the longest
        return count

    def _decay(self, now_s: float) -> None:
        if self._decayed_s is None:
            self._decayed_s = now_s
        turns = int((now_s - self._decayed_s) / self._decay_s)
        if turns:
            self._decayed_s += turns * self._decay_s
            left = {identity: count - turns for identity, count in self._counts.items()}
            self._counts = {identity: count for identity, count in left.items() if count > 0}


class Popularity:
    """Blocks asked for more than `min_count` times, as a TinyLFU sketch has it."""

    __slots__ = ("_frequency", "_min_count")

    def __init__(self, frequency: TinyLfu, min_count: int = 1) -> None:
        self._frequency = frequency
        self._min_count = min_count

    def admitted(self, waiting: Sequence[Waiting], now_s: float) -> Sequence[Waiting]:
        """Those asked for often."""
        del now_s
        counts = self._frequency.counts([each.name.identity for each in waiting])
        asked = zip(waiting, counts, strict=True)
        return [each for each, count in asked if count > self._min_count]


class MinPriorityPrefix:
    """The leading blocks whose priority suffices: behind a gap nothing is of use."""

    __slots__ = ("_min_priority",)

    def __init__(self, min_priority: int) -> None:
        self._min_priority = min_priority

    def admitted(self, waiting: Sequence[Waiting], now_s: float) -> Sequence[Waiting]:
        """Those before the first that does not suffice."""
        del now_s
        return list(takewhile(lambda each: each.priority >= self._min_priority, waiting))


class All:
    """Blocks that each of several policies admits, asked in turn."""

    __slots__ = ("_policies",)

    def __init__(self, policies: Sequence[OffloadPolicy]) -> None:
        self._policies = policies

    def admitted(self, waiting: Sequence[Waiting], now_s: float) -> Sequence[Waiting]:
        """Those that are left."""
        for policy in self._policies:
            waiting = policy.admitted(waiting, now_s)
        return waiting
