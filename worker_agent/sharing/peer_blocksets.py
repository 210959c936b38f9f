"""The blocksets of other workers, imported from their announcements.

    announcement.blocksets ─▶ model, layout, epoch? ─▶ imported by each of our ranks
                                        └ no ─▶ refused, with the reason

A worker that is withdrawn, or restarts without a blockset, is dropped; a later epoch replaces an
earlier one. Rounds find workers, and `find` reads at once the announcement that a request needs.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.subjects import Subjects
from router.protocol.values import Rank
from router.runtime.bus.connection import Bus
from router.runtime.bus.errors import BusUnavailableError
from worker_agent.process.announced import ROUND_S, AnnouncedWorkers
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.sharing import BlockSharing

log = logging.getLogger(__name__)

FRESH_S = 10.0
"""The time after which a request's source is read again: a restarted worker has other addresses."""
PATIENCE_S = 0.25
"""The timeout of a lookup; a request is then computed without the blocks."""


class RefusedBlockset(Struct, frozen=True):
    """A blockset that this worker cannot use, and why."""

    worker_id: int
    dp_rank: int
    reason: str


class PeerBlocksets:
    """The imports of an agent's ranks; belongs to the event loop."""

    def __init__(self, announced: AnnouncedWorkers, ranks: Mapping[Rank, BlockSharing]) -> None:
        """Import into `ranks`, which may still be added to. Without a bus nothing is imported."""
        self._announced = announced
        self._ranks = ranks
        self._seen: dict[Rank, str | None] = {}
        """The announced blocksets: why each is refused, or None."""
        self._at: tuple[Bus, Subjects] | None = None
        self.refusals = 0
        """Number of blocksets refused since the start; each counts once."""

    @property
    def refused(self) -> list[RefusedBlockset]:
        """The announced blocksets that are not imported."""
        return [
            RefusedBlockset(rank.worker_id, rank.dp_rank, reason)
            for rank, reason in self._seen.items()
            if reason is not None
        ]

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
        announced = {rank for worker in self._announced.workers for rank, _ in _blocksets(worker)}
        for rank in self._seen.keys() - announced:
            del self._seen[rank]
            self._forget(rank)
        for worker in read:
            for rank, blockset in _blocksets(worker):
                self._seen[rank] = self._imported(rank, blockset)

    def _imported(self, rank: Rank, blockset: Mapping[str, Any]) -> str | None:
        """Import a blockset into all other ranks; return why not, or None."""
        try:
            _check_rank(rank, blockset)
            data = msgspec.json.encode(blockset)
            for ours, sharing in self._ranks.items():
                if ours != rank:
                    sharing.import_remote_blockset(data)
        except BlocksetError as error:
            if self._seen.get(rank) != str(error):
                self.refusals += 1
                log.warning("blockset of worker %s refused: %s", rank, error)
            self._forget(rank)
            return str(error)
        return None

    def _forget(self, rank: Rank) -> None:
        for sharing in self._ranks.values():
            sharing.forget(rank)


def _blocksets(worker: WorkerAnnouncement) -> Iterator[tuple[Rank, Mapping[str, Any]]]:
    for dp_rank, blockset in worker.blocksets.items():
        yield Rank(worker.worker_id, dp_rank), blockset


def _check_rank(rank: Rank, blockset: Mapping[str, Any]) -> None:
    """Raise BlocksetError for a blockset of another rank than the one that announces it."""
    named = blockset.get("worker_id"), blockset.get("dp_rank", 0)
    if named != (rank.worker_id, rank.dp_rank):
        raise BlocksetError(
            "worker_id", f"{named}", f"{rank}, which announces it", rule="other_rank"
        )
