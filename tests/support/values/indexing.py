"""An index alone, in process, on a real bus, and engines whose events it reads."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from router.config.indexer import IndexerConfig
from router.protocol.values import Identity, Tier
from router.publisher.event_publisher import KvEventPublisher
from router.publisher.journal.journal import EventJournal
from router.runtime.bus.connection import StreamLimits
from router.runtime.bus.transport import NatsTransport
from router.runtime.process.settings import configured
from router.sequence.hashing.block_hashes import chain, hash_seed, local_block_hashes, token_array
from router.sequence.hashing.keyed_hashes import PLAIN
from router.service.indexer import IndexService
from support.processes.running import SUBJECTS, FakeWorker, RunningService
from support.processes.servers import free_port
from support.values.builders import rank
from worker_agent.process.control import answer_checkpoint_requests

BLOCK_SIZE = 16
PROMPT = list(range(1, 161))


def local_hashes(tokens, block_size=BLOCK_SIZE, **seed):
    hashes = local_block_hashes(token_array(tokens), block_size, seed=hash_seed(**seed))
    return [int(local_hash) for local_hash in hashes]


def sequence_hashes(tokens, block_size=BLOCK_SIZE, **seed):
    return chain(local_hashes(tokens, block_size, **seed)).tolist()


class Engine:
    """One rank's publisher, as an agent runs it; it is not announced."""

    def __init__(self, bus, worker_id, dp_rank=0, block_size=BLOCK_SIZE, naming=PLAIN):
        self.rank = rank(worker_id, dp_rank)
        self._bus = bus
        journal = EventJournal(self.rank, 1, Identity(naming.scheme, block_size), naming=naming)
        self.events = KvEventPublisher(journal, SUBJECTS.events(self.rank), flush_interval_s=0.01)

    def cache(self, tokens, tier=Tier.DEVICE, **seed):
        self.events.stored(tier, sequence_hashes(tokens, **seed), None)

    async def run(self):
        async def ours():
            """Verify nothing: no other process has the id."""

        transport = NatsTransport(self._bus, SUBJECTS, StreamLimits())
        async with asyncio.TaskGroup() as group:
            group.create_task(self.events.run(transport, ours))
            group.create_task(
                answer_checkpoint_requests(self._bus, SUBJECTS, {self.rank: self.events})
            )


class RunningIndex(RunningService):
    """An index service, registrations with it, and workers for it."""

    def __init__(self, nats_url, **fields):
        port = free_port()
        settings = {"namespace": "test", "drain_s": 0.0, "name": "i", **fields}
        self.config = configured(IndexerConfig, nats_url=nats_url, http_port=port, **settings)
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(IndexService(self.config), port)

    async def register(self, instance_id, **fields):
        defaults = {"endpoint": "nats", "model_name": "m", "block_size": BLOCK_SIZE}
        return await self.post("/register", {"instance_id": instance_id, **defaults, **fields})

    async def query(self, tokens, **fields):
        answer = await self.post("/query", {"token_ids": list(tokens), "model_name": "m", **fields})
        return answer.json()

    async def scores(self, tokens, **fields):
        return (await self.query(tokens, **fields)).get("scores")

    async def instance(self, instance_id):
        views = (await self.client.get("/workers")).json()
        return next((view for view in views if view["instance_id"] == instance_id), None)

    async def status(self, instance_id):
        view = await self.instance(instance_id)
        return view and view["status"]


@asynccontextmanager
async def publishing(*engines):
    """Their publishers run inside."""
    tasks = [asyncio.create_task(engine.run()) for engine in engines]
    try:
        yield engines
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@asynccontextmanager
async def announced(bus, worker_id, **fields):
    """A worker that announces itself, reports, and has delivered its first checkpoint."""
    worker = FakeWorker(bus, worker_id, **fields)
    await worker.announce()
    await worker.deliver()
    async with AsyncExitStack() as stack:
        reporting = asyncio.create_task(worker.report_forever())
        stack.push_async_callback(asyncio.wait, [reporting])
        stack.callback(reporting.cancel)
        yield worker
