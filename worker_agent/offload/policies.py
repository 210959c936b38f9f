"""Which blocks are worth a place in a slower tier.

A policy looks at a run of blocks in prompt order, none of which the tier has, and answers for each.
What it counts on the way is its own. Sources: the filters of Dynamo's offload managers, both
generations; its `presence` goes without saying here.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from worker_agent.blocks.eviction.tiny_lfu import TinyLfu
from worker_agent.offload.queue import Waiting
from worker_agent.offload_rule import OffloadRule

FREQUENCY_COUNTS_A_BLOCK = 4
"""Blocks that Frequency remembers to have seen, for each that the tier has room for."""


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


class Frequency:
    """Blocks seen a second time, while the first is not forgotten.

    A count begins at 1 and doubles with each sight; every `decay_s` all go down by one, and those
    at nothing are forgotten.
    """

    __slots__ = ("_counts", "_decay_s", "_decayed_s", "_max_counts")

    def __init__(self, max_counts: int, decay_s: float = 600.0) -> None:
        self._max_counts = max_counts
        self._decay_s = decay_s
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
    """Blocks seen more than `min_count` times, as a TinyLFU sketch has it: in 4 to 8 bytes a block
    of the tier, and forgetting by how much else was seen instead of by time.
    """

    __slots__ = ("_frequency", "_min_count")

    def __init__(self, num_blocks: int, min_count: int = 1) -> None:
        """`num_blocks`: of the tier."""
        self._frequency = TinyLfu(num_blocks)
        self._min_count = min_count

    def admitted(self, waiting: Sequence[Waiting], now_s: float) -> Sequence[Waiting]:
        """Those seen often."""
        del now_s
        identities = [each.name.identity for each in waiting]
        self._frequency.note(identities)
        seen = zip(waiting, self._frequency.counts(identities), strict=True)
        return [each for each, count in seen if count > self._min_count]


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


def policy_of(rule: OffloadRule, num_blocks: int) -> OffloadPolicy:
    """The policy of this name for a tier of so many blocks."""
    match rule:
        case "all":
            return PassAll()
        case "frequency":
            return Frequency(max_counts=FREQUENCY_COUNTS_A_BLOCK * num_blocks)
        case "popularity":
            return Popularity(num_blocks)
