"""The offload queue into one tier: blocks waiting to be stored, and batches being stored.

It has no side effects: it returns what is to be moved, and the caller that moves it reports the
result.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from worker_agent.blocks.names import BlockName
from worker_agent.offload.policies import OffloadPolicy
from worker_agent.offload.queue import OffloadQueue, StorePace, Waiting

MAX_BATCHES = 2
"""Limit of batches in progress: one is read while the previous one is written."""
MAX_URGENT_BATCHES = 8
"""The same for blocks that cannot wait; beyond it, they are not stored."""


class EdgeCounters(Struct):
    """Counters of the transfers in one direction between two tiers, since creation."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Busy time of the receiving tier; of the giving tier for loads."""
    failed: int = 0
    """Blocks that did not arrive."""
    calls: int = 0
    """Calls in which blocks arrived."""

    def count(self, blocks: int, block_bytes: int, busy_s: float) -> None:
        """Add `blocks` arrived blocks."""
        self.calls += 1
        self.blocks += blocks
        self.bytes += blocks * block_bytes
        self.seconds += busy_s


class OffloadLane:
    """The offload queue into a tier.

    Invariant: at most `MAX_URGENT_BATCHES` batches are in progress.
    """

    __slots__ = ("_batch_blocks", "_policy", "batches", "counters", "pace", "queue")

    def __init__(
        self, queue: OffloadQueue, policy: OffloadPolicy, pace: StorePace, batch_blocks: int
    ) -> None:
        self.queue = queue
        self.counters = EdgeCounters()
        self.batches = 0
        self._policy = policy
        self.pace = pace
        self._batch_blocks = batch_blocks

    def offer(self, names: Sequence[BlockName], priority: int, container: int) -> None:
        """Queue blocks that the tier above holds."""
        self.queue.add(names, priority, container)

    def due(
        self,
        has: Callable[[bytes], bool],
        now_s: float,
        *,
        is_load_waiting: bool,
        is_decoding: bool,
        is_ending: bool,
    ) -> "OffloadBatch":
        """Return the blocks that are due: those to be moved now, and those already there.

        `is_ending`: the store rate is not limited.
        """
        if not len(self.queue) or self.batches >= MAX_BATCHES:
            return OffloadBatch([], [])
        wanted = min(len(self.queue), self._batch_blocks)
        if not is_ending:
            wanted = self.pace.take(
                wanted, now_s, is_load_waiting=is_load_waiting, is_decoding=is_decoding
            )
        return self._batch(*_parted(self.queue.take(wanted), has), now_s)

    def urgent(
        self, waiting: Sequence[Waiting], has: Callable[[bytes], bool], now_s: float
    ) -> "OffloadBatch":
        """Return, of blocks that cannot wait, those to be moved now, and those already there.

        Their rate is not limited. While too many batches are in progress, blocks are dropped.
        """
        missing, there = _parted(waiting, has)
        if missing and self.batches >= MAX_URGENT_BATCHES:
            self.queue.dropped_blocks += len(missing)
            return OffloadBatch([], there)
        return self._batch(missing, there, now_s)

    def wait_s(self) -> float | None:
        """Return the time until blocks are due, or None if that does not depend on time."""
        if not len(self.queue) or self.batches >= MAX_BATCHES:
            return None
        return self.pace.wait_s()

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring. O(waiting blocks)."""
        self.queue.check_invariants()
        assert 0 <= self.batches <= MAX_URGENT_BATCHES

    def _batch(
        self, missing: Sequence[Waiting], there: list[Waiting], now_s: float
    ) -> "OffloadBatch":
        return OffloadBatch(list(self._policy.admitted(missing, now_s)), there)


class OffloadBatch(Struct, frozen=True):
    """Blocks due for storing in a tier.

    `missing`: to be stored now. `there`: already held by the tier.
    """

    missing: list[Waiting]
    there: list[Waiting]


def _parted(
    waiting: Sequence[Waiting], has: Callable[[bytes], bool]
) -> tuple[list[Waiting], list[Waiting]]:
    """Return the blocks that the tier lacks, and those that it has."""
    missing: list[Waiting] = []
    there: list[Waiting] = []
    for each in waiting:
        (there if has(each.name.identity) else missing).append(each)
    return missing, there
