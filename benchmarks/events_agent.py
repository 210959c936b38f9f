"""One agent without an engine: announced, publishing, reporting, answering."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from events_reader import INCARNATION, announcement
from events_writer import REQUEST_BLOCKS, RankWriter

from router.protocol.catalogue import encode_entry, worker_key
from router.protocol.loads import LoadReport
from router.protocol.subjects import Subjects
from router.publisher.event_publisher import MIN_FLUSH_S
from router.publisher.journal.journal import DEFAULT_LIMITS
from router.publisher.load_publisher import LoadPublisher, ReceivedBeacons
from router.runtime.bus.connection import Bus, StreamLimits, connection
from router.runtime.bus.kv_lease import KvLease
from router.runtime.bus.transport import NatsTransport
from worker_agent.process.control import answer_checkpoint_requests, listen_for_beacons

WORKER_ID = 1
POOL_BLOCKS = 4_096
STORE_S = 0.01
REPORT_S = 0.4


class Agent:
    """A rank on a bus."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        worker_id: int = WORKER_ID,
        pool_blocks: int = POOL_BLOCKS,
    ) -> None:
        self.bus = bus
        self.subjects = subjects
        self._worker_id = worker_id
        self._writer = RankWriter(subjects, worker_id, pool_blocks, DEFAULT_LIMITS, MIN_FLUSH_S)
        self._beacons = ReceivedBeacons()
        self._report_count = 0

    @property
    def published_event_id(self) -> int:
        """The last event that the log has."""
        return self._writer.publisher.published.event_id

    async def store_forever(self) -> None:
        """Store a request every 10 ms, until cancelled."""
        while True:
            self.store(1)
            await asyncio.sleep(STORE_S)

    def store(self, requests: int) -> None:
        """Store `requests` requests."""
        for _ in range(requests):
            self._writer.store(REQUEST_BLOCKS)

    async def run(self) -> None:
        """Live on the bus until cancelled."""
        announcer = KvLease(self.bus.js, self.subjects, worker_key(self._worker_id), INCARNATION)
        await announcer.look()
        await announcer.claim(encode_entry(announcement(self._worker_id)))
        rank, publisher = self._writer.rank, self._writer.publisher
        transport = NatsTransport(self.bus, self.subjects, StreamLimits())
        loads = LoadPublisher(self._report, self.subjects.load(rank), interval_s=REPORT_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(announcer.run())
            group.create_task(publisher.run(transport, announcer.verify))
            group.create_task(loads.run(transport))
            group.create_task(listen_for_beacons(self.bus, self.subjects, self._beacons))
            group.create_task(
                answer_checkpoint_requests(self.bus, self.subjects, {rank: publisher})
            )

    def _report(self) -> LoadReport:
        self._report_count += 1
        publisher = self._writer.publisher
        return LoadReport(
            worker_id=self._worker_id,
            dp_rank=0,
            agent_incarnation=INCARNATION,
            incarnation=INCARNATION,
            report_id=self._report_count,
            event_id=publisher.published.event_id,
            state=publisher.published.state,
            waiting_s=publisher.waiting_s,
            heard=self._beacons.last(time.monotonic()),
        )


@asynccontextmanager
async def living_agent(
    url: str, namespace: str, worker_id: int = WORKER_ID, pool_blocks: int = POOL_BLOCKS
) -> AsyncIterator[Agent]:
    """An agent that lives while inside."""
    async with connection(url, "agent", lambda _: None) as bus:
        agent = Agent(bus, Subjects(namespace), worker_id, pool_blocks)
        life = asyncio.create_task(agent.run())
        try:
            yield agent
        finally:
            life.cancel()
            await asyncio.wait([life])
