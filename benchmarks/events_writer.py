"""The agents' side of a measurement: ranks with a journal, a publisher and made-up blocks."""

import asyncio
from collections import deque

import numpy as np
from events_reader import IDENTITY, INCARNATION

from router.protocol.subjects import Subjects
from router.protocol.values import HashArray, Rank, Tier
from router.publisher.event_publisher import KvEventPublisher
from router.publisher.journal.journal import EventJournal, JournalLimits
from router.runtime.bus.transport import Transport

ENDLESS = JournalLimits(tail_blocks=1 << 40)
"""The log is never shortened, so that all of it is there to be read."""

REQUEST_BLOCKS = 32
"""What one request of 512 new tokens lets an engine store."""


class RankWriter:
    """One rank that stores paths and, beyond its pool, removes the oldest from their leaves."""

    def __init__(
        self,
        subjects: Subjects,
        worker_id: int,
        pool_blocks: int,
        limits: JournalLimits = ENDLESS,
        flush_interval_s: float = 0.0,
    ) -> None:
        self.rank = Rank(worker_id, 0)
        self.journal = EventJournal(self.rank, INCARNATION, IDENTITY, limits)
        self.publisher = KvEventPublisher(
            self.journal, subjects.events(self.rank), flush_interval_s=flush_interval_s
        )
        self._random = np.random.default_rng(worker_id)
        self._paths: deque[HashArray] = deque()
        self._room_blocks = pool_blocks

    @property
    def held_blocks(self) -> int:
        """How many blocks are held now."""
        return sum(map(len, self._paths))

    def store(self, blocks: int) -> None:
        """Store a path of new blocks, and make room for it first."""
        while self._room_blocks < blocks:
            oldest = self._paths.popleft()
            self.publisher.removed(Tier.DEVICE, oldest[::-1].copy())
            self._room_blocks += len(oldest)
        path = self._random.integers(1, 1 << 63, blocks, dtype=np.uint64)
        self.publisher.stored(Tier.DEVICE, path, None)
        self._paths.append(path)
        self._room_blocks -= blocks

    async def flush(self, transport: Transport) -> None:
        """Publish what was noted."""
        await self.publisher.flush(transport, verified)


async def verified() -> None:
    """Do nothing: no other process writes here."""


async def write_messages(
    writers: list[RankWriter], transport: Transport, messages: int, requests: int
) -> int:
    """Write `messages` messages of `requests` requests each. Returns the blocks held then."""

    async def write(writer: RankWriter) -> None:
        await writer.flush(transport)
        for _ in range(messages // len(writers)):
            for _ in range(requests):
                writer.store(REQUEST_BLOCKS)
            await writer.flush(transport)

    await asyncio.gather(*map(write, writers))
    return sum(writer.held_blocks for writer in writers)
