"""What goes down: from the device into the first tier, and from each tier into the next.

offer ─▶ due ─▶ store ─▶ kept ─▶ offered to the next ─▶ at hand still, or read ─▶ store …
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from worker_agent.blocks.names import BlockName
from worker_agent.offload.queue import Waiting
from worker_agent.tiers.level import Levels
from worker_agent.tiers.worker import Call, Spent
from worker_agent.transfer.block_tier import BlockTier
from worker_agent.transfer.outcome import ARRIVED, Outcome, leading

Fetch: TypeAlias = Callable[[], Tensor]
"""Rows on the host, (n, block bytes) uint8, for a tier's thread to come by."""


class Descent:
    """Stores under way, and those that wait."""

    __slots__ = ("_at_hand", "_is_ending", "_last", "_lives", "_tiers", "is_decoding",
                 "is_load_waiting")  # fmt: skip

    def __init__(self, tiers: Levels) -> None:
        self._tiers = tiers
        self._lives = 0
        self._is_ending = False
        self._last = len(tiers.levels) - 1
        """The last tier in which anything is to be stored."""
        self._at_hand: dict[bytes, Tensor] = {}
        """Rows that were stored a moment ago, so that the next tier need not have them read."""
        self.is_decoding = False
        self.is_load_waiting = False

    def offer(self, index: int, names: Sequence[BlockName], priority: int, container: int) -> None:
        """These are in the tier above, and wait for a place in this one, if there is one."""
        if index <= self._last:
            self._tiers.levels[index].way.offer(names, priority, container)

    def cancel(self, container: int) -> int:
        """Nobody wants these to be stored any more; how many still waited."""
        return sum(level.way.queue.cancel(container) for level in self._tiers.levels)

    def due(self, index: int, now_s: float) -> list[Waiting]:
        """What is to be stored in a tier now; what is there already goes on to the next."""
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

    def move(self, now_s: float) -> None:
        """Set in motion what is due between tiers."""
        for index in range(1, len(self._tiers.levels)):
            waiting = self.due(index, now_s)
            rows = [self._at_hand.get(each.name.identity) for each in waiting]
            here = [row for row in rows if row is not None]
            if len(here) == len(waiting):
                self._store(index, waiting, partial(torch.stack, here))
            else:
                self._read(index, waiting)
        self._at_hand.clear()

    def store(self, waiting: Sequence[Waiting], rows: Tensor) -> None:
        """Into the first tier. `rows` may lie on a device."""
        self._store(0, waiting, _on_host(rows))

    def end(self, *, is_device_gone: bool) -> int:
        """Nothing more will be offered of the device; what waits is to get as far as tiers outlive
        this process, and no further. How many blocks are given up that would have.
        """
        self._is_ending = True
        kept = [index for index, level in enumerate(self._tiers.levels) if level.store.is_kept]
        self._last = max(kept, default=-1)
        for level in self._tiers.levels[self._last + 1 :]:
            level.way.queue.clear()
        if not is_device_gone or self._last < 0:
            return 0
        return self._tiers.levels[0].way.queue.give_up()

    @property
    def is_busy(self) -> bool:
        """Whether anything waits, or is under way."""
        return any(level.way.batches or len(level.way.queue) for level in self._tiers.levels)

    def give_up(self) -> int:
        """What still waits is not stored; how many blocks."""
        return sum(level.way.queue.give_up() for level in self._tiers.levels)

    def clear(self) -> None:
        """What waits, and what is under way, is not to be stored."""
        self._lives += 1
        self._at_hand.clear()
        for level in self._tiers.levels:
            level.way.queue.clear()

    def _go_on(self, index: int, kept: Iterable[Waiting]) -> None:
        for each in kept:
            self.offer(index + 1, [each.name], each.priority, each.container)

    def _read(self, index: int, waiting: Sequence[Waiting]) -> None:
        """From the tier above, on its thread; then they are stored."""
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
        if not above.worker.submit(Call(run, then)):
            way.batches -= 1
            way.counters.failed += len(waiting)

    def _store(self, index: int, waiting: Sequence[Waiting], fetch: Fetch) -> None:
        if not waiting:
            return
        level, life = self._tiers.levels[index], self._lives
        way, block_bytes = level.way, self._tiers.settings.block_bytes

        def run() -> tuple[Tensor, list[Outcome]]:
            rows = fetch()
            return rows, _written(level.store, waiting, rows)

        def then(written: tuple[Tensor, list[Outcome]] | None, spent: Spent) -> None:
            way.batches -= 1
            rows, outcomes = written or (torch.empty(0), [])
            kept = [place for place, each in enumerate(outcomes) if each in ARRIVED]
            way.counters.count(len(kept), block_bytes, spent.busy_s)
            way.counters.failed += len(waiting) - len(kept)
            if life == self._lives:
                self._at_hand |= {waiting[each].name.identity: rows[each] for each in kept}
                self._go_on(index, [waiting[place] for place in kept])

        way.batches += 1
        if not level.worker.submit(Call(run, then)):
            way.batches -= 1
            way.counters.failed += len(waiting)


def _on_host(rows: Tensor) -> Fetch:
    """Copied by the tier's thread, on a stream of its own: the device's computing does not wait."""
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


def _written(store: BlockTier, waiting: Sequence[Waiting], rows: Tensor) -> list[Outcome]:
    """Blocks of equal priority in one call."""
    outcomes: list[Outcome] = []
    for priority, group in groupby(waiting, key=lambda each: each.priority):
        names = [each.name for each in group]
        outcomes += store.store(names, rows[len(outcomes) : len(outcomes) + len(names)], priority)
    return outcomes


def _read_scattered(store: BlockTier, identities: Sequence[bytes], rows: Tensor) -> list[int]:
    """Which of these came, wherever there are gaps."""
    came: list[int] = []
    start = 0
    while start < len(identities):
        count = leading(store.load(identities[start:], rows[start:]))
        came += range(start, start + count)
        start += count + 1
    return came
