"""Asks every new engine at once what it is and whether it renders prompts, before requests do."""

import asyncio
import time

import msgspec

from router.forward.apis.api import CHAT
from router.forward.request_body import CompletionRequest, read_completion_request
from router.forward.resilience.worker_list import ListedWorker, WorkerList
from router.forward.tokenizer.engine_tokens import ASK_AGAIN_S, Engine, EngineTokens

EVERY_S = 1.0
MOST_AT_ONCE = 4


class EngineWatch:
    """The limits of an engine are logged when it appears, not at its first image."""

    def __init__(self, engines: EngineTokens, roster: WorkerList) -> None:
        self._engines = engines
        self._roster = roster
        self._due_s: dict[ListedWorker, float] = {}
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self) -> None:
        """Ask engines, until cancelled. A hanging engine delays no other one."""
        async with asyncio.TaskGroup() as group:
            while True:
                now_s = time.monotonic()
                workers = self._roster.workers.values()
                self._due_s = {each: self._due_s.get(each, now_s) for each in workers}
                for worker, due_s in self._due_s.items():
                    if due_s <= now_s:
                        self._due_s[worker] = now_s + ASK_AGAIN_S
                        group.create_task(self._ask(worker))
                await asyncio.sleep(EVERY_S)

    async def _ask(self, worker: ListedWorker) -> None:
        engine = Engine(worker.endpoint, worker.block_size)
        async with self._places:
            await self._engines.dialect(engine, None)
            await self._engines.rendered(_hello(worker.model), engine, None)


def _hello(model: str) -> CompletionRequest:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    return read_completion_request(CHAT, msgspec.json.encode(body))
