"""Policies that decide which blocks are copied to a slower tier.

A policy decides on a run of blocks in prompt order, none of which the tier has, for each block. It
may keep counts of them. Sources: the filters of Dynamo's offload managers, both generations; its
`presence` is implied here.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from worker_agent.blocks.eviction.tiny_lfu import TinyLfu

if TYPE_CHECKING:
    from worker_agent.offload.queue import Waiting

OffloadRule: TypeAlias = Literal["all", "frequency", "popularity"]
"""The policy of a tier: PassAll, Frequency or Popularity."""


FREQUENCY_COUNTS_A_BLOCK = 4
"""Blocks that `Frequency` remembers, per block of the tier."""


class OffloadPolicy(Protocol):
    """A decision on a run of blocks; may count that they were seen."""

    def admitted(self, waiting: Sequence["Waiting"], now_s: float) -> Sequence["Waiting"]:
        """Return the blocks worth copying, in order."""


class PassAll:
    """A policy that admits every block."""

    __slots__ = ()

    def admitted(self, waiting: Sequence["Waiting"], now_s: float) -> Sequence["Waiting"]:
        """Return all of them."""
        del now_s
        return waiting


class Frequency:
    """A policy that admits blocks seen a second time, while the first is remembered.

    A count begins at 1 and doubles each time the block is seen. Every `decay_s` all counts decrease
    by one, and those at 0 are forgotten.
    """

    __slots__ = ("_counts", "_decay_s", "_decayed_s", "_max_counts")

    def __init__(self, max_counts: int, decay_s: float = 600.0) -> None:
        self._max_counts = max_counts
        self._decay_s = decay_s
        self._counts: dict[bytes, int] = {}
        self._decayed_s: float | None = None

    def __len__(self) -> int:
        return len(self._counts)

    def admitted(self, waiting: Sequence["Waiting"], now_s: float) -> Sequence["Waiting"]:
        """Return the blocks seen before."""
        self._decay(now_s)
        return [each for each in waiting if self._note(each.name.identity) >= 2]

    def _note(self, identity: bytes) -> int:
        count = self._counts.pop(identity, 0)
        self._counts[identity] = count = min(count * 2, 2**16) or 1
        if len(self._counts) > self._max_counts:
            del self._counts[next(iter(self._counts))]  # The one not seen for the longest time.
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
    """A policy that admits blocks seen more than `min_count` times, by a TinyLFU sketch.

    It takes 4 to 8 bytes per block of the tier, and counts decay with the number of other blocks
    seen, not with time.
    """

    __slots__ = ("_frequency", "_min_count")

    def __init__(self, num_blocks: int, min_count: int = 1) -> None:
        """Initialise for a tier of `num_blocks` blocks."""
        self._frequency = TinyLfu(num_blocks)
        self._min_count = min_count

    def admitted(self, waiting: Sequence["Waiting"], now_s: float) -> Sequence["Waiting"]:
        """Return the blocks seen often."""
        del now_s
        identities = [each.name.identity for each in waiting]
        self._frequency.note(identities)
        seen = zip(waiting, self._frequency.counts(identities), strict=True)
        return [each for each, count in seen if count > self._min_count]


class MinPriorityPrefix:
    """A policy that admits leading blocks of sufficient priority, up to the first gap.

    Blocks behind a gap are useless.
    """

    __slots__ = ("_min_priority",)

    def __init__(self, min_priority: int) -> None:
        self._min_priority = min_priority

    def admitted(self, waiting: Sequence["Waiting"], now_s: float) -> Sequence["Waiting"]:
        """Return the blocks before the first of too low priority."""
        del now_s
        return list(takewhile(lambda each: each.priority >= self._min_priority, waiting))


class All:
    """A policy that admits blocks that all of several policies admit, applied in order."""

    __slots__ = ("_policies",)

    def __init__(self, policies: Sequence[OffloadPolicy]) -> None:
        self._policies = policies

    def admitted(self, waiting: Sequence["Waiting"], now_s: float) -> Sequence["Waiting"]:
        """Return the blocks that every policy admits."""
        for policy in self._policies:
            waiting = policy.admitted(waiting, now_s)
        return waiting


def policy_of(rule: OffloadRule, num_blocks: int) -> OffloadPolicy:
    """Return the policy of this name for a tier of `num_blocks` blocks."""
    match rule:
        case "all":
            return PassAll()
        case "frequency":
            return Frequency(max_counts=FREQUENCY_COUNTS_A_BLOCK * num_blocks)
        case "popularity":
            return Popularity(num_blocks)
