"""The way down into one tier: what waits to be stored there, and what is being stored.

Pure: what is to be moved is the answer; whoever moves it says what came of it.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from worker_agent.blocks.names import BlockName
from worker_agent.offload.pacing import StorePace
from worker_agent.offload.policies import OffloadPolicy
from worker_agent.offload.queue import OffloadQueue, Waiting

MAX_BATCHES = 2
"""Under way at once: one is read while the one before it is written."""


class EdgeCounters(Struct):
    """What went one way between two tiers since they were made."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """The receiving tier's, or the giving one's on the way up."""
    failed: int = 0
    """Blocks that did not arrive."""
    calls: int = 0
    """In which blocks arrived."""

    def count(self, blocks: int, block_bytes: int, busy_s: float) -> None:
        """So many more arrived."""
        self.calls += 1
        self.blocks += blocks
        self.bytes += blocks * block_bytes
        self.seconds += busy_s


class WayDown:
    """Of blocks into a tier. Invariant: at most `MAX_BATCHES` batches are under way."""

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
        """Let blocks wait that are in the tier above."""
        self.queue.add(names, priority, container)

    def due(
        self,
        has: Callable[[bytes], bool],
        now_s: float,
        *,
        is_load_waiting: bool,
        is_decoding: bool,
        is_ending: bool,
    ) -> "Due":
        """Those whose turn it is: to be moved now, or there already. Whatever the pace, if it is
        ending.
        """
        if not len(self.queue) or self.batches >= MAX_BATCHES:
            return Due([], [])
        wanted = min(len(self.queue), self._batch_blocks)
        if not is_ending:
            wanted = self.pace.take(
                wanted, now_s, is_load_waiting=is_load_waiting, is_decoding=is_decoding
            )
        taken = self.queue.take(wanted)
        there = [each for each in taken if has(each.name.identity)]
        missing = [each for each in taken if not has(each.name.identity)]
        return Due(list(self._policy.admitted(missing, now_s)), there)

    def wait_s(self) -> float | None:
        """In how long something will be due; None if nothing waits for time to pass."""
        if not len(self.queue) or self.batches >= MAX_BATCHES:
            return None
        return self.pace.wait_s()

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring. O(waiting blocks)."""
        self.queue.check_invariants()
        assert 0 <= self.batches <= MAX_BATCHES


class Due(Struct, frozen=True):
    """Blocks whose turn it is to be stored in a tier."""

    missing: list[Waiting]
    there: list[Waiting]
