"""Agents that store blocks at a steady pace, and remember when."""

import asyncio
import time
from typing import NamedTuple

from events_writer import REQUEST_BLOCKS, RankWriter, verified

from router.protocol.subjects import Subjects
from router.publisher.event_publisher import flush_window_s
from router.publisher.journal.journal import DEFAULT_LIMITS
from router.runtime.bus.connection import Bus, StreamLimits, ensure_event_stream
from router.runtime.bus.transport import NatsTransport

POOL_BLOCKS = 2_048


class Sent(NamedTuple):
    """A message of a worker: its last event, and when each request that it covers was stored."""

    worker_id: int
    event_id: int
    stored_ns: list[int]


class PacedFleet:
    """Workers with a publisher each, which flushes as in a fleet of this size."""

    def __init__(self, bus: Bus, subjects: Subjects, workers: int) -> None:
        self._bus = bus
        self._subjects = subjects
        self._window_s = flush_window_s(workers)
        self._writers = [
            RankWriter(subjects, n, POOL_BLOCKS, DEFAULT_LIMITS, self._window_s)
            for n in range(workers)
        ]
        self._sent: list[Sent] = []

    async def store(self, seconds: float, blocks_per_s: float) -> list[Sent]:
        """Fill the pools, then store requests, one worker after the other; every message that was
        published.
        """
        agents = [_Agent(self._bus, self._subjects, writer) for writer in self._writers]
        await ensure_event_stream(self._bus.js, self._subjects, StreamLimits())
        publishing = [
            asyncio.create_task(agent.publish(number / len(agents) * self._window_s))
            for number, agent in enumerate(agents)
        ]
        await self._until_published(agents)
        await _store(agents, seconds, blocks_per_s / REQUEST_BLOCKS)
        await self._until_published(agents)
        for task in publishing:
            task.cancel()
        await asyncio.wait(publishing)
        return [message for agent in agents for message in agent.sent]

    async def _until_published(self, agents: list["_Agent"]) -> None:
        while not all(agent.is_done for agent in agents):
            await asyncio.sleep(self._window_s)


class _Agent(NatsTransport):
    """A worker with its way to the bus, on which it notes what each message covers."""

    def __init__(self, bus: Bus, subjects: Subjects, writer: RankWriter) -> None:
        super().__init__(bus, subjects, StreamLimits())
        self.sent: list[Sent] = []
        self._writer = writer
        self._stored_ns: list[int] = []
        for _ in range(POOL_BLOCKS // REQUEST_BLOCKS):
            writer.store(REQUEST_BLOCKS)

    def store(self) -> None:
        self._stored_ns.append(time.monotonic_ns())
        self._writer.store(REQUEST_BLOCKS)

    @property
    def is_done(self) -> bool:
        """Whether everything was published."""
        journal = self._writer.journal
        published = self._writer.publisher.published.event_id
        return not journal.has_news and published == journal.last_event_id

    async def publish(self, delay_s: float) -> None:
        """Agents of a real fleet do not flush all at the same moment either."""
        await asyncio.sleep(delay_s)
        await self._writer.publisher.run(self, verified)

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        expected_sequence: int,
        replaces_history: bool = False,
    ) -> int:
        """See `Transport`."""
        event_id = self._writer.journal.last_event_id
        self.sent.append(Sent(self._writer.rank.worker_id, event_id, self._stored_ns))
        self._stored_ns = []
        return await super().append(
            subject,
            payload,
            expected_sequence=expected_sequence,
            replaces_history=replaces_history,
        )


async def _store(agents: list[_Agent], seconds: float, requests_per_s: float) -> None:
    start_s = time.monotonic()
    for number in range(int(seconds * requests_per_s)):
        early_s = start_s + number / requests_per_s - time.monotonic()
        if early_s > 0:
            await asyncio.sleep(early_s)
        agents[number % len(agents)].store()
