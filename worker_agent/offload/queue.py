"""Blocks that wait to be copied to a slower tier.

Higher priority goes first, then whoever came first: the opposite of eviction, where low priority
goes first. Waiting pins nothing: what is queued is the name of a block, which is looked up again
when its turn comes. Source: the offload queue of Dynamo's block manager, which has no bound.
"""

from collections.abc import Sequence

from msgspec import Struct
from sortedcontainers import SortedDict

from worker_agent.blocks.names import BlockName


class Waiting(Struct, frozen=True, gc=False):
    """A block that waits. `container`: what it came with, and is cancelled with."""

    name: BlockName
    priority: int
    container: int


class OffloadQueue:
    """At most `max_blocks` wait; the least urgent give way. Every operation O(log blocks) a block.

    Invariant: a block waits once, however often it was asked for.
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
        """Let blocks wait; those that gave way, which may be the new ones themselves."""
        for name in names:
            if name.identity not in self._keys:
                self._add(Waiting(name, priority, container))
        surplus = range(max(len(self._waiting) - self._max_blocks, 0))
        dropped = [self._take(-1).name for _ in surplus]
        self.dropped_blocks += len(dropped)
        return dropped

    def take(self, count: int) -> list[Waiting]:
        """The most urgent, in order; as many as there are."""
        return [self._take(0) for _ in range(min(count, len(self._waiting)))]

    def cancel(self, container: int) -> int:
        """Nobody wants these any more; how many waited."""
        identities = self._containers.pop(container, set())
        for identity in identities:
            del self._waiting[self._keys.pop(identity)]
        return len(identities)

    def give_up(self) -> int:
        """Nothing waits any more; how many blocks did, which are dropped."""
        given_up = len(self._waiting)
        self.dropped_blocks += given_up
        self.clear()
        return given_up

    def clear(self) -> None:
        """Nothing waits any more."""
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
