"""Blocks that wait to be copied to a slower tier, and the rate limit of these stores.

A token bucket of `burst_blocks` fills at `blocks_per_s`, at a tenth of it while requests are
decoded, and gives nothing while a load waits.

Blocks that wait to be copied to a slower tier.

Higher priority goes first, then earlier arrival: the opposite of eviction, where low priority goes
first. A waiting block is not pinned: the queue has its name, which is looked up again when it is
next. Source: the offload queue of Dynamo's block manager, which has no bound.
"""

from collections.abc import Sequence

from msgspec import Struct
from sortedcontainers import SortedDict

from router.errors import InvalidFieldError
from worker_agent.blocks.names import BlockName

WHILE_DECODING = 0.1


class StorePace:
    """A token bucket of blocks; time is an argument and never goes back."""

    __slots__ = ("_blocks_per_s", "_burst_blocks", "_filled_s", "_rate", "_room_blocks")

    def __init__(self, blocks_per_s: float, burst_blocks: int) -> None:
        """Initialise a full bucket. Raises InvalidFieldError."""
        for field, value in (("blocks_per_s", blocks_per_s), ("burst_blocks", burst_blocks)):
            if value <= 0:
                raise InvalidFieldError(field, f"{value}", "above 0")
        self._blocks_per_s = blocks_per_s
        self._burst_blocks = burst_blocks
        self._room_blocks = float(burst_blocks)
        self._rate = blocks_per_s
        self._filled_s: float | None = None

    def take(
        self, wanted_blocks: int, now_s: float, *, is_load_waiting: bool, is_decoding: bool
    ) -> int:
        """Return how many of the wanted blocks may be stored now; they count as stored."""
        self._fill(now_s, is_decoding=is_decoding)
        if is_load_waiting:
            return 0
        taken_blocks = min(wanted_blocks, int(self._room_blocks))
        self._room_blocks -= taken_blocks
        return taken_blocks

    @property
    def blocks_per_s(self) -> float:
        """The current rate at which the bucket fills."""
        return self._rate

    def wait_s(self) -> float:
        """Return the time after the last `take` until there is room for a block."""
        return max(1.0 - self._room_blocks, 0.0) / self._rate

    def _fill(self, now_s: float, *, is_decoding: bool) -> None:
        passed_s = 0.0 if self._filled_s is None else now_s - self._filled_s
        self._filled_s = now_s
        self._rate = self._blocks_per_s * (WHILE_DECODING if is_decoding else 1.0)
        self._room_blocks = min(self._room_blocks + self._rate * passed_s, self._burst_blocks)


class Waiting(Struct, frozen=True, gc=False):
    """A block that waits. `container`: the group it arrived with, and is cancelled with."""

    name: BlockName
    priority: int
    container: int


class OffloadQueue:
    """A queue of at most `max_blocks`; the least urgent blocks are dropped.

    Every operation is O(log blocks) per block. Invariant: a block waits once, however often it was
    added.
    """

    __slots__ = ("_arrivals", "_containers", "_keys", "_max_blocks", "_waiting", "dropped_blocks")

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._waiting: SortedDict[tuple[int, int], Waiting] = SortedDict()
        self._keys: dict[bytes, tuple[int, int]] = {}
        self._containers: dict[int, set[bytes]] = {}
        self._arrivals = 0
        self.dropped_blocks = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._keys

    def add(self, names: Sequence[BlockName], priority: int, container: int) -> list[BlockName]:
        """Queue blocks; return those dropped, which may be the new ones themselves."""
        for name in names:
            if name.identity not in self._keys:
                self._add(Waiting(name, priority, container))
        surplus = range(max(len(self._waiting) - self._max_blocks, 0))
        dropped = [self._take(-1).name for _ in surplus]
        self.dropped_blocks += len(dropped)
        return dropped

    def take(self, count: int) -> list[Waiting]:
        """Remove and return the most urgent blocks, in order; at most `count`."""
        return [self._take(0) for _ in range(min(count, len(self._waiting)))]

    def cancel(self, container: int) -> int:
        """Remove the blocks of a container; return their number."""
        identities = self._containers.pop(container, set())
        for identity in identities:
            del self._waiting[self._keys.pop(identity)]
        return len(identities)

    def give_up(self) -> int:
        """Drop all blocks; return their number."""
        given_up = len(self._waiting)
        self.dropped_blocks += given_up
        self.clear()
        return given_up

    def clear(self) -> None:
        """Remove all blocks, without counting them as dropped."""
        self._waiting.clear()
        self._keys.clear()
        self._containers.clear()

    def check_invariants(self) -> None:
        """Assert the invariant in the class's docstring. O(blocks)."""
        assert {w.name.identity: key for key, w in self._waiting.items()} == self._keys
        containers: dict[int, set[bytes]] = {}
        for waiting in self._waiting.values():
            containers.setdefault(waiting.container, set()).add(waiting.name.identity)
        assert containers == self._containers
        assert len(self._waiting) <= self._max_blocks

    def _add(self, waiting: Waiting) -> None:
        self._arrivals += 1
        key = (-waiting.priority, self._arrivals)
        self._waiting[key] = waiting
        self._keys[waiting.name.identity] = key
        self._containers.setdefault(waiting.container, set()).add(waiting.name.identity)

    def _take(self, place: int) -> Waiting:
        _, waiting = self._waiting.popitem(place)
        identity, container = waiting.name.identity, waiting.container
        del self._keys[identity]
        self._containers[container].remove(identity)
        if not self._containers[container]:
            del self._containers[container]
        taken: Waiting = waiting
        return taken
