"""Blocks whose parent is not known yet: their tokens, kept for a while to name them by."""

from collections import deque
from collections.abc import Iterable, Iterator

from msgspec import structs

from router.publisher.engine_batch import EngineStored


class _Held:
    __slots__ = ("event", "until_s")

    def __init__(self, event: EngineStored, until_s: float) -> None:
        self.event = event
        self.until_s = until_s


class HeldBack:
    """Stores by their parent, within bounds on blocks and time; the oldest are given up first."""

    __slots__ = ("_by_parent", "_limit_blocks", "_queue", "_wait_s", "blocks", "given_up_blocks")

    def __init__(self, limit_blocks: int, wait_s: float) -> None:
        self._limit_blocks = limit_blocks
        self._wait_s = wait_s
        self.given_up_blocks = 0
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._by_parent: dict[tuple[int, int | None], list[_Held]] = {}
        self._queue: deque[_Held] = deque()
        self.blocks = 0

    def add(self, event: EngineStored, now_s: float) -> None:
        """Hold a store back; its arrays are copied, for they may be views of a message."""
        hashes, tokens = event.block_hashes.copy(), event.tokens.copy()
        event = structs.replace(event, block_hashes=hashes, tokens=tokens)
        held = _Held(event, now_s + self._wait_s)
        self._queue.append(held)
        self._by_parent.setdefault(_key(event), []).append(held)
        self.blocks += len(event.block_hashes)
        while self.blocks > self._limit_blocks:
            self._give_up(self._queue[0])

    def take(self, group: int, hashes: Iterable[int]) -> list[EngineStored]:
        """Stores behind these parents, held back no longer. O(parents), and O(held) if any."""
        taken = [h for each in hashes for h in self._by_parent.pop((group, each), ())]
        if taken:
            gone = set(map(id, taken))
            self._queue = deque(held for held in self._queue if id(held) not in gone)
        self.blocks -= sum(len(held.event.block_hashes) for held in taken)
        return [held.event for held in taken]

    def expire(self, now_s: float) -> None:
        """Give up what has waited for too long."""
        while self._queue and self._queue[0].until_s <= now_s:
            self._give_up(self._queue[0])

    def events(self) -> Iterator[EngineStored]:
        """All, oldest first."""
        return (held.event for held in self._queue)

    def _give_up(self, held: _Held) -> None:
        self._queue.popleft()
        siblings = self._by_parent[_key(held.event)]
        siblings.remove(held)
        if not siblings:
            del self._by_parent[_key(held.event)]
        self.blocks -= len(held.event.block_hashes)
        self.given_up_blocks += len(held.event.block_hashes)


def _key(event: EngineStored) -> tuple[int, int | None]:
    return event.group, event.parent
