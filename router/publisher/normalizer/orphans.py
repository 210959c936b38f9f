"""Stores with an unknown parent: their content is kept for a limited time, to compute hashes."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from msgspec import structs

from router.publisher.engine_events.batch import EngineStored

_FEWEST_PURGED = 4_096


class _Orphan:
    __slots__ = ("event", "until_s")

    def __init__(self, event: EngineStored, until_s: float) -> None:
        self.event = event
        self.until_s = until_s


class OrphanBlocks:
    """Stores by their parent, limited in blocks and time; the oldest are dropped first."""

    __slots__ = (
        "_by_parent",
        "_limit_blocks",
        "_purge_above",
        "_queue",
        "_wait_s",
        "blocks",
        "given_up_blocks",
    )

    def __init__(self, limit_blocks: int, wait_s: float) -> None:
        self._limit_blocks = limit_blocks
        self._wait_s = wait_s
        self.given_up_blocks = 0
        self.clear()

    def clear(self) -> None:
        """Remove all stores."""
        self._by_parent: dict[tuple[int, int | None], list[_Orphan]] = {}
        self._queue: OrderedDict[int, _Orphan] = OrderedDict()
        self._purge_above = _FEWEST_PURGED
        self.blocks = 0

    @property
    def is_purge_due(self) -> bool:
        """True if the stores have doubled since the last purge."""
        return self.blocks > self._purge_above

    def add(self, event: EngineStored, now_s: float) -> bool:
        """Hold back a store; its arrays are copied, because they may be views of a message.

        Returns whether the oldest stores were dropped for it.
        """
        hashes, tokens = event.block_hashes.copy(), event.tokens.copy()
        event = structs.replace(event, block_hashes=hashes, tokens=tokens)
        held = _Orphan(event, now_s + self._wait_s)
        self._queue[id(held)] = held
        self._by_parent.setdefault(_key(event), []).append(held)
        self.blocks += len(event.block_hashes)
        is_full = self.blocks > self._limit_blocks
        while self.blocks > self._limit_blocks:
            self._give_up(self._oldest)
        return is_full

    def take(self, group: int, hashes: Iterable[int]) -> list[EngineStored]:
        """Remove and return the stores with these parents. O(parents)."""
        taken = [h for each in hashes for h in self._by_parent.pop((group, each), ())]
        for held in taken:
            del self._queue[id(held)]
            self.blocks -= len(held.event.block_hashes)
        return [held.event for held in taken]

    def expire(self, now_s: float) -> None:
        """Drop stores that have waited for longer than the limit."""
        while self._queue and self._oldest.until_s <= now_s:
            self._give_up(self._oldest)

    def purge(self, orphans: set[int]) -> None:
        """Drop stores of group 0 without orphans, unless later ones wait for them. O(held)."""
        wanted: set[int | None] = {*orphans}
        for held in reversed(list(self._queue.values())):
            if held.event.group or not wanted.isdisjoint(held.event.block_hashes.tolist()):
                wanted.add(held.event.parent)
            else:
                self._remove(held)
        self._purge_above = max(2 * self.blocks, _FEWEST_PURGED)

    def events(self) -> Iterator[EngineStored]:
        """Return all stores, oldest first."""
        return (held.event for held in self._queue.values())

    @property
    def _oldest(self) -> _Orphan:
        return next(iter(self._queue.values()))

    def _give_up(self, held: _Orphan) -> None:
        self._remove(held)
        self.given_up_blocks += len(held.event.block_hashes)

    def _remove(self, held: _Orphan) -> None:
        del self._queue[id(held)]
        siblings = self._by_parent[_key(held.event)]
        siblings.remove(held)
        if not siblings:
            del self._by_parent[_key(held.event)]
        self.blocks -= len(held.event.block_hashes)


def _key(event: EngineStored) -> tuple[int, int | None]:
    return event.group, event.parent
