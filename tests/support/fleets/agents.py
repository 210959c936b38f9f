"""An agent in process, with its engine, for tests."""

import asyncio
from contextlib import asynccontextmanager

import httpx

from router.runtime.process.settings import configured
from support.processes.servers import NO_TLS, eventually, free_port
from worker_agent.config.reference import ReferenceConfig
from worker_agent.reference.agent import WorkerAgent


class RunningAgent:
    def __init__(self, nats_url, **fields):
        self.port = free_port()
        small = {
            "num_layers": 1, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2,
            "num_blocks": 64, "max_model_len": 512, "block_size": 16,
        }  # fmt: skip
        defaults = {"namespace": "test", "worker_id": 7, "name": "w7", **small, **fields}
        config = configured(ReferenceConfig, nats_url=nats_url, http_port=self.port, **defaults)
        self.agent = WorkerAgent(config)
        self.client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", timeout=60, verify=NO_TLS
        )
        self.stop = asyncio.Event()
        self.task = None

    @asynccontextmanager
    async def running(self, path="/ready"):
        self.task = asyncio.create_task(self.agent.run(self.stop))
        try:
            await eventually(lambda: self.answers(path))
            yield self
        finally:
            self.stop.set()
            await asyncio.wait([self.task])
            await self.client.aclose()

    async def answers(self, path):
        if self.task.done():
            await self.task
        try:
            return (await self.client.get(path)).status_code == 200
        except httpx.HTTPError:
            return False

    async def complete(self, prompt, **fields):
        headers = fields.pop("headers", {})
        body = {"prompt": prompt, "max_tokens": 4, "return_token_ids": True, **fields}
        answer = await self.client.post("/v1/completions", json=body, headers=headers)
        return answer.status_code, answer.json()
