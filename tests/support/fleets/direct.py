"""A router in process in direct mode, and engines for it."""

import asyncio
from contextlib import ExitStack, asynccontextmanager

from support.engines.zmq_engines import Engine, stored
from support.processes.running import RunningRouter
from support.processes.servers import eventually

BLOCK_SIZE = 4


class DirectEngine:
    """A worker's engine: one publisher a rank, each holding what a test gives it."""

    def __init__(self, worker_id, ranks=1, block_size=BLOCK_SIZE, **fields):
        self.worker_id = worker_id
        self.block_size = block_size
        self.ranks = [Engine(dp_rank=dp_rank, **fields) for dp_rank in range(ranks)]

    def __enter__(self):
        for rank in self.ranks:
            rank.start()
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.stop()

    def wait(self):
        """Return once the engine has published all that it holds."""
        for rank in self.ranks:
            rank.wait()

    def cache(self, tokens, dp_rank=0, salt=0):
        """Hold a prompt. Engine hashes are of no consequence, as long as they differ."""
        self.ranks[dp_rank].publish(self.event(tokens, salt))

    def event(self, tokens, salt=0):
        size = self.block_size
        hashes = [hash((salt, *tokens[: i + size])) for i in range(0, len(tokens), size)]
        return stored(hashes, list(tokens), block_size=size)

    def endpoint(self, dp_rank):
        rank = self.ranks[dp_rank]
        return f"tcp://127.0.0.1:{rank.port + dp_rank}"

    def replay_endpoint(self, dp_rank):
        rank = self.ranks[dp_rank]
        return f"tcp://127.0.0.1:{rank.replay_port + dp_rank}"

    def body(self, **fields):
        dp_ranks = range(len(self.ranks))
        replays = {
            str(dp): self.replay_endpoint(dp) for dp in dp_ranks if self.ranks[dp].has_replay
        }
        return {
            "worker_id": self.worker_id,
            "endpoint": f"http://w{self.worker_id}",
            "block_size": self.block_size,
            "data_parallel_size": len(self.ranks),
            "kv_events_endpoints": {str(dp): self.endpoint(dp) for dp in dp_ranks},
            "replay_endpoints": replays,
            **fields,
        }


class DirectRouter(RunningRouter):
    """A router without a bus, unless it is given one."""

    def __init__(self, nats_url="", **fields):
        super().__init__(nats_url, **fields)

    async def register(self, engine, **fields):
        await asyncio.to_thread(engine.wait)  # else "exact" may come before the last of the prompts
        answer = await self.post("/workers", engine.body(**fields))
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def overlaps(self, tokens, **fields):
        """Cached blocks of every rank, by (worker, rank)."""
        answer = await self.post("/overlap_scores", {"token_ids": list(tokens), **fields})
        workers = answer.json().get("workers", ())
        return {(w["worker_id"], w["dp_rank"]): w["device_blocks"] for w in workers}

    async def until_exact(self, *worker_ids):
        for worker_id in worker_ids:
            await eventually(lambda i=worker_id: self.trusts(i))


@asynccontextmanager
async def direct_router(*engines, **fields):
    """A router with these engines registered, and every one of them exact."""
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine)
        async with DirectRouter(**fields).running() as router:
            for engine in engines:
                await router.register(engine)
            await router.until_exact(*(engine.worker_id for engine in engines))
            yield router
