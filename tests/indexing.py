"""An index alone, in process, on a real bus, and engines whose events it reads."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from builders import rank
from router.index_config import IndexerConfig
from router.index_service import IndexService
from router.protocol.values import Identity, Tier
from router.publisher.bus import StreamLimits
from router.publisher.events import KvEventPublisher
from router.publisher.journal import EventJournal
from router.publisher.transport import NatsTransport
from router.sequence.hashing import chain, hash_seed, local_block_hashes, token_array
from router.sequence.naming import PLAIN
from running import SUBJECTS, FakeWorker, RunningService
from servers import free_port
from worker_agent.control import answer_checkpoint_requests

BLOCK_SIZE = 16
PROMPT = list(range(1, 161))


def local_hashes(tokens, block_size=BLOCK_SIZE, **seed):
    hashes = local_block_hashes(token_array(tokens), block_size, seed=hash_seed(**seed))
    return [int(local_hash) for local_hash in hashes]


def sequence_hashes(tokens, block_size=BLOCK_SIZE, **seed):
    return chain(local_hashes(tokens, block_size, **seed)).tolist()


class Engine:
    """One rank's publisher, as an agent runs it; nobody is told that it exists."""

    def __init__(self, bus, worker_id, dp_rank=0, block_size=BLOCK_SIZE, naming=PLAIN):
        self.rank = rank(worker_id, dp_rank)
        self._bus = bus
        journal = EventJournal(self.rank, 1, Identity(naming.scheme, block_size), naming=naming)
        self.events = KvEventPublisher(journal, SUBJECTS.events(self.rank), flush_interval_s=0.01)

    def cache(self, tokens, tier=Tier.DEVICE, **seed):
        self.events.stored(tier, sequence_hashes(tokens, **seed), None)

    async def run(self):
        async def ours():
            """Nobody else has the id."""

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
        self.config = IndexerConfig(nats_url=nats_url, http_port=port, **settings)
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
