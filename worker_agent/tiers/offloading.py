"""Offloading: blocks from the device to the first tier, and from each tier to the next.

offer ─▶ due ─▶ store ─▶ stored ─▶ offered to the next tier ─▶ rows in memory, or read ─▶ store …
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import TypeAlias

import torch
from msgspec import Struct
from torch import Tensor

from worker_agent.blocks.names import BlockName
from worker_agent.offload.queue import Waiting
from worker_agent.tiers.level import Levels
from worker_agent.tiers.worker import Spent, TierJob
from worker_agent.transfer.block_tier import BlockTier
from worker_agent.transfer.copy_stream import DeviceCopy
from worker_agent.transfer.plan import ARRIVED, BlockResult, leading

Fetch: TypeAlias = Callable[[], Tensor]
"""Supplier of rows on the host, (n, block bytes) uint8; called on a tier's thread."""


class _Arriving(Struct, frozen=True):
    """Blocks of the device that are being copied to the host."""

    waiting: Sequence[Waiting]
    copy: DeviceCopy


class Offloading:
    """Stores in progress, and blocks that wait to be stored."""

    __slots__ = ("_arriving", "_at_hand", "_is_ending", "_last", "_lives", "_tiers", "is_decoding",
                 "is_load_waiting")  # fmt: skip

    def __init__(self, tiers: Levels) -> None:
        self._tiers = tiers
        self._lives = 0
        self._is_ending = False
        self._last = len(tiers.levels) - 1
        """Index of the last tier in which blocks are still stored."""
        self._arriving: list[_Arriving] = []
        """Batches of the first tier that are not on the host yet."""
        self._at_hand: dict[bytes, Tensor] = {}
        """Rows stored since the last `move`, so that the next tier does not read them back."""
        self.is_decoding = False
        self.is_load_waiting = False

    def offer(self, index: int, names: Sequence[BlockName], priority: int, container: int) -> None:
        """Queue blocks of the tier above for storing in this tier, if there is such a tier."""
        if index <= self._last:
            self._tiers.levels[index].way.offer(names, priority, container)

    def cancel(self, container: int) -> int:
        """Remove the waiting blocks of `container` from all queues and return their number."""
        return sum(level.way.queue.cancel(container) for level in self._tiers.levels)

    def due(self, index: int, now_s: float) -> list[Waiting]:
        """Return the blocks to be stored in a tier now.

        Due blocks that the tier already has are offered to the next tier instead.
        """
        if index >= len(self._tiers.levels):
            return []
        due = self._tiers.levels[index].way.due(
            lambda identity: self._tiers.has(index, identity),
            now_s,
            is_load_waiting=self.is_load_waiting,
            is_decoding=self.is_decoding,
            is_ending=self._is_ending,
        )
        self._go_on(index, due.there)
        return due.missing

    def urgent(self, names: Sequence[BlockName], now_s: float) -> list[Waiting]:
        """Return those of these device blocks that are to be stored in the first tier now."""
        if self._last < 0:
            return []
        waiting = [Waiting(name, 0, 0) for name in names]
        batch = self._tiers.levels[0].way.urgent(
            waiting, lambda identity: self._tiers.has(0, identity), now_s
        )
        self._go_on(0, batch.there)
        return batch.missing

    def move(self, now_s: float) -> None:
        """Start the stores of rows that arrived, and those that are due between tiers."""
        self._take_arrived()
        for index in range(1, len(self._tiers.levels)):
            waiting = self.due(index, now_s)
            rows = [self._at_hand.get(each.name.identity) for each in waiting]
            here = [row for row in rows if row is not None]
            if len(here) == len(waiting):
                self._store(index, waiting, partial(torch.stack, here))
            else:
                self._read(index, waiting)
        self._at_hand.clear()

    def store(self, waiting: Sequence[Waiting], rows: Tensor | DeviceCopy) -> None:
        """Store rows in the first tier. They may lie on a device, or be on their way to the host.

        A batch counts as in progress from now on, so that `due` does not return too many.
        """
        if not isinstance(rows, DeviceCopy):
            self._store(0, waiting, _on_host(rows))
            return
        self._tiers.levels[0].way.batches += 1
        self._arriving.append(_Arriving(waiting, rows))
        self._take_arrived()

    def await_copies(self) -> None:
        """Wait for the copies from the device, and start their stores. Blocking."""
        for each in self._arriving:
            each.copy.wait()
        self._take_arrived()

    def end(self, *, is_device_gone: bool) -> int:
        """Stop accepting blocks of the device and return the number of blocks given up.

        Waiting blocks are stored as far as the last tier that outlives this process, and no
        further. If the device is gone, the blocks that wait for the first tier are given up; only
        those that would have reached a persistent tier are counted.
        """
        self._is_ending = True
        self.await_copies()
        kept = [index for index, level in enumerate(self._tiers.levels) if level.store.is_kept]
        self._last = max(kept, default=-1)
        for level in self._tiers.levels[self._last + 1 :]:
            level.way.queue.clear()
        if not is_device_gone or self._last < 0:
            return 0
        return self._tiers.levels[0].way.queue.give_up()

    @property
    def is_busy(self) -> bool:
        """True if blocks wait to be stored or are being stored."""
        return any(level.way.batches or len(level.way.queue) for level in self._tiers.levels)

    def give_up(self) -> int:
        """Drop the waiting blocks and return their number."""
        return sum(level.way.queue.give_up() for level in self._tiers.levels)

    def clear(self) -> None:
        """Drop the waiting blocks, and ignore the results of stores in progress."""
        self._lives += 1
        self._at_hand.clear()
        for level in self._tiers.levels:
            level.way.queue.clear()
        for _ in self._arriving:
            self._tiers.levels[0].way.batches -= 1
        self._arriving.clear()

    def _take_arrived(self) -> None:
        """Start the stores of the copies that are complete; they complete in order."""
        while self._arriving and self._arriving[0].copy.is_done:
            arrived = self._arriving.pop(0)
            self._tiers.levels[0].way.batches -= 1
            self._store(0, arrived.waiting, _on_host(arrived.copy.rows))

    def _go_on(self, index: int, kept: Iterable[Waiting]) -> None:
        for each in kept:
            self.offer(index + 1, [each.name], each.priority, each.container)

    def _read(self, index: int, waiting: Sequence[Waiting]) -> None:
        """Read blocks from the tier above, on its thread, then store them."""
        way, life = self._tiers.levels[index].way, self._lives
        above = self._tiers.levels[index - 1]
        size = len(waiting), self._tiers.settings.block_bytes
        identities = [each.name.identity for each in waiting]

        def run() -> tuple[Tensor, list[int]]:
            rows = torch.empty(size, dtype=torch.uint8)
            return rows, _read_scattered(above.store, identities, rows)

        def then(read: tuple[Tensor, list[int]] | None, spent: Spent) -> None:
            del spent
            way.batches -= 1
            rows, places = read or (torch.empty(0), [])
            way.counters.failed += len(waiting) - len(places)
            if life == self._lives:
                self._store(index, [waiting[place] for place in places], lambda: rows[places])

        way.batches += 1
        if not above.worker.submit(TierJob(run, then)):
            way.batches -= 1
            way.counters.failed += len(waiting)

    def _store(self, index: int, waiting: Sequence[Waiting], fetch: Fetch) -> None:
        if not waiting:
            return
        level, life = self._tiers.levels[index], self._lives
        way, block_bytes = level.way, self._tiers.settings.block_bytes

        def run() -> tuple[Tensor, list[BlockResult]]:
            rows = fetch()
            return rows, _written(level.store, waiting, rows)

        def then(written: tuple[Tensor, list[BlockResult]] | None, spent: Spent) -> None:
            way.batches -= 1
            rows, outcomes = written or (torch.empty(0), [])
            kept = [place for place, each in enumerate(outcomes) if each in ARRIVED]
            way.counters.count(len(kept), block_bytes, spent.busy_s)
            way.counters.failed += len(waiting) - len(kept)
            if life == self._lives:
                self._at_hand |= {waiting[each].name.identity: rows[each] for each in kept}
                self._go_on(index, [waiting[place] for place in kept])

        way.batches += 1
        if not level.worker.submit(TierJob(run, then)):
            way.batches -= 1
            way.counters.failed += len(waiting)


def _on_host(rows: Tensor) -> Fetch:
    """Return a supplier that copies `rows` to the host.

    The tier's thread copies on a separate CUDA stream, so that the device's computation does not
    wait.
    """
    if not rows.is_cuda:
        return lambda: rows
    gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]
    gathered.record()

    def fetch() -> Tensor:
        side = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            side.wait_event(gathered)
            host = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(rows, non_blocking=True)
        side.synchronize()
        return host

    return fetch


def _written(store: BlockTier, waiting: Sequence[Waiting], rows: Tensor) -> list[BlockResult]:
    """Store rows with one call per run of equal priority, and return their outcomes."""
    outcomes: list[BlockResult] = []
    for priority, group in groupby(waiting, key=lambda each: each.priority):
        names = [each.name for each in group]
        outcomes += store.store(names, rows[len(outcomes) : len(outcomes) + len(names)], priority)
    return outcomes


def _read_scattered(store: BlockTier, identities: Sequence[bytes], rows: Tensor) -> list[int]:
    """Load these blocks where the tier has them, and return the places that were loaded."""
    came: list[int] = []
    start = 0
    while start < len(identities):
        count = leading(store.load(identities[start:], rows[start:]))
        came += range(start, start + count)
        start += count + 1
    return came
