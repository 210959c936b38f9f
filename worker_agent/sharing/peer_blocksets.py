"""The blocksets of other workers, imported from their announcements.

    announcement.blocksets ─▶ model, layout, epoch? ─▶ imported by each of our ranks
                                        └ no ─▶ refused, with the reason

A worker that is withdrawn, or restarts without a blockset, is dropped; a later epoch replaces an
earlier one. Rounds find workers, and `find` reads at once the announcement that a request needs.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.runtime.bus.connection import Bus
from router.runtime.bus.errors import BusUnavailableError
from worker_agent.process.announced import ROUND_S, AnnouncedWorkers
from worker_agent.sharing.blockset_imports import BlocksetImports
from worker_agent.sharing.sharing import BlockSharing

FRESH_S = 10.0
"""The time after which a request's source is read again: a restarted worker has other addresses."""
PATIENCE_S = 0.25
"""The timeout of a lookup; a request is then computed without the blocks."""


class PeerBlocksets:
    """The imports of an agent's ranks; belongs to the event loop."""

    def __init__(self, announced: AnnouncedWorkers, ranks: Mapping[Rank, BlockSharing]) -> None:
        """Import into `ranks`, which may still be added to. Without a bus nothing is imported."""
        self._announced = announced
        self._ranks = ranks
        self._at: tuple[Bus, Subjects] | None = None
        self.imports = BlocksetImports(ranks)

    async def run(self, bus: Bus, subjects: Subjects) -> None:
        """Import what is announced on this bus, until cancelled."""
        self._at = bus, subjects
        try:
            while True:
                with suppress(BusUnavailableError):
                    self._import(await self._announced.refresh(bus, subjects))
                await asyncio.sleep(ROUND_S)
        finally:
            self._at = None

    async def find(self, source: Rank, ours: Rank) -> Sequence[str]:
        """Return where a rank serves the blocks that ours imported; empty if it has none."""
        if self._announced.age_s(source.worker_id) >= FRESH_S and self._at is not None:
            with suppress(BusUnavailableError, TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    found = await self._announced.read(*self._at, source.worker_id)
                    self._import([] if found is None else [found])
        return self._ranks[ours].addresses_of(source)

    def _import(self, read: Sequence[WorkerAnnouncement]) -> None:
        """Import the blocksets just read, and drop those that are no longer announced."""
        workers = self._announced.workers
        self.imports.keep({rank for worker in workers for rank, _ in _blocksets(worker)})
        for worker in read:
            for rank, blockset in _blocksets(worker):
                self.imports.take(rank, blockset)


def _blocksets(worker: WorkerAnnouncement) -> Iterator[tuple[Rank, Mapping[str, Any]]]:
    for dp_rank, blockset in worker.blocksets.items():
        yield Rank(worker.worker_id, dp_rank), blockset
