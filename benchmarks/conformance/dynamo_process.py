"""Workers or the router of a Dynamo fleet, with commands on stdin; run by a Python with Dynamo.

    dynamo_process.py workers     then a line `["tcp://…", …]`: a worker for each engine's socket
    dynamo_process.py router      then a line `[]`

Discovery is a folder (`DYN_FILE_KV`), events travel on Dynamo's ZMQ plane. A worker is registered
as Dynamo's engines are, and follows its engine's socket with Dynamo's own publisher. Every line is
a JSON list, a method and its arguments; every response is a line of JSON, the first after start.
"""

import asyncio
import json
import sys

from dynamo.llm import (
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

BLOCK_SIZE = 32
MODEL = "corpus"
PATH = "ns1.backend.generate"


def new_runtime():
    return DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")


async def no_tokens(request, context=None):  # noqa: ARG001
    yield {"token_ids": []}


class Worker:
    """A worker with an instance id of its own; `start` returns it."""

    def __init__(self, events):
        self._events = events
        self._runtime = new_runtime()
        self._endpoint = self._runtime.endpoint(PATH)

    async def start(self):
        self._serving = asyncio.ensure_future(self._endpoint.serve_endpoint(no_tokens))
        await asyncio.sleep(0.2)
        config = ModelRuntimeConfig()
        config.total_kv_blocks, config.max_num_batched_tokens = 100_000, 8_192
        config.enable_local_indexer = True
        await register_model(
            ModelInput.Tensor, ModelType.TensorBased, self._endpoint, MODEL, MODEL,
            kv_cache_block_size=BLOCK_SIZE, runtime_config=config,
            worker_type=WorkerType.Aggregated,
        )  # fmt: skip
        self._publisher = KvEventPublisher(
            endpoint=self._endpoint, kv_block_size=BLOCK_SIZE, dp_rank=0, zmq_endpoint=self._events,
            enable_local_indexer=True,
        )  # fmt: skip
        return self._endpoint.connection_id()


async def workers(described):
    """Start all; return their instance ids."""
    started = [Worker(events) for events in described]
    ids = [await worker.start() for worker in started]
    return ids, started


class Router:
    """Dynamo's router of all workers, with its default settings."""

    def __init__(self):
        self._runtime = new_runtime()
        self._router = KvRouter(self._runtime.endpoint(PATH), BLOCK_SIZE, KvRouterConfig())

    async def overlap(self, token_ids, lora_name, cache_salt):
        found = await self._router.get_overlap_scores(
            token_ids, lora_name=lora_name, cache_namespace=cache_salt
        )
        return found["workers"]


def answer(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def main(role):
    described = await asyncio.to_thread(sys.stdin.readline)
    if role == "workers":
        ids, kept = await workers(json.loads(described))
        answer(ids)
    else:
        kept = Router()
        answer([])
    while line := await asyncio.to_thread(sys.stdin.readline):
        method, *arguments = json.loads(line)
        answer(await getattr(kept, method)(*arguments))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
