"""A real Dynamo worker or router with commands on stdin; run by a Python that has Dynamo.

    dynamo_process.py worker jetstream|core    publishes events and loads, as engines' workers do
    dynamo_process.py router jetstream|core    Dynamo's own KV router, with replica sync

Every line is a JSON list, a method and its arguments; every answer is a line of JSON. 1.0.2
publishes on JetStream or on core NATS, 1.6.1 on core NATS alone.
"""

import asyncio
import json
import sys
from importlib.metadata import version

from dynamo.llm import (
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    register_model,
)
from dynamo.runtime import DistributedRuntime

BLOCK_SIZE = 16
PATH = "ns1.backend.generate"
IS_1_0 = version("ai-dynamo-runtime").startswith("1.0.")

if not IS_1_0:
    from dynamo.llm import WorkerType


def new_endpoint():
    """An endpoint, and its runtime, which has to be kept."""
    enables_nats = (True,) if IS_1_0 else ()
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", *enables_nats)
    return runtime, runtime.endpoint(PATH)


async def no_tokens(request, context=None):
    yield {"token_ids": []}


class Worker:
    """A worker that is served, registered as a model, and publishes for its ranks."""

    def __init__(self, mode):
        self.mode = mode
        self.runtime, self.endpoint = new_endpoint()
        self.publishers = {}
        self.loads = WorkerMetricsPublisher()

    async def start(self):
        self.serving = asyncio.ensure_future(self.endpoint.serve_endpoint(no_tokens))
        await asyncio.sleep(0.5)
        await self.register()
        await self.loads.create_endpoint(self.endpoint)
        self.publisher(0)
        return self.endpoint.connection_id()

    async def register(self):
        """Dynamo's routers wait for a worker that serves a model."""
        config = ModelRuntimeConfig()
        config.total_kv_blocks, config.max_num_batched_tokens = 1000, 8192
        config.enable_local_indexer = self.mode == "core"
        await register_model(
            ModelInput.Tensor,
            ModelType.TensorBased,
            self.endpoint,
            "m",
            "m",
            kv_cache_block_size=BLOCK_SIZE,
            runtime_config=config,
            **({} if IS_1_0 else {"worker_type": WorkerType.Aggregated}),
        )

    def publisher(self, dp_rank):
        if dp_rank not in self.publishers:
            local = {"enable_local_indexer": self.mode == "core"} if IS_1_0 else {}
            self.publishers[dp_rank] = KvEventPublisher(
                endpoint=self.endpoint, kv_block_size=BLOCK_SIZE, dp_rank=dp_rank, **local
            )
        return self.publishers[dp_rank]

    async def stored(self, tokens, hashes, parent=None, lora_name=None, dp_rank=0):
        sizes = [BLOCK_SIZE] * len(hashes)
        publish = self.publisher(dp_rank).publish_stored
        publish(tokens, sizes, hashes, parent, lora_name=lora_name)

    async def removed(self, hashes, dp_rank=0):
        self.publisher(dp_rank).publish_removed(hashes)

    async def load(self, blocks):
        self.loads.publish(0, blocks)


class Router:
    """Dynamo's router; with `jetstream` it purges the stream behind two messages, and dumps."""

    def __init__(self, mode):
        self.mode = mode
        self.runtime, self.endpoint = new_endpoint()

    async def start(self):
        settings = {"router_replica_sync": True}
        if self.mode == "jetstream":
            settings |= {"durable_kv_events": True, "router_snapshot_threshold": 2}
        self.router = KvRouter(self.endpoint, BLOCK_SIZE, KvRouterConfig(**settings))

    async def best_worker(self, tokens, request_id):
        return list(await self.router.best_worker(tokens, request_id=request_id))

    async def mark_prefill_complete(self, request_id):
        await self.router.mark_prefill_complete(request_id)

    async def free(self, request_id):
        await self.router.free(request_id)


def answer(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def main(role, mode):
    subject = {"worker": Worker, "router": Router}[role](mode)
    answer(await subject.start())
    while line := await asyncio.to_thread(sys.stdin.readline):
        method, *arguments = json.loads(line)
        answer(await getattr(subject, method)(*arguments))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
