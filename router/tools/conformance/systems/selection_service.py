"""The HTTP API of selection services, which several systems offer."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from router.tools.conformance.steps import BLOCK_SIZE, Marks, Prompt
from router.tools.conformance.systems.base import Answer, Remark, Seat, Server

TIERS = ("device_blocks", "host_pinned_blocks", "disk_blocks")
"""Each counts the blocks held in its tier or in a faster one."""


class SelectionService:
    """Engines are registered over HTTP; the overlap of every engine can be queried."""

    title: str
    answers_best_only = False
    marks = Marks()
    skips: frozenset[str] = frozenset()
    worker_in_log = re.compile(r'worker_id[=:] ?"?(\d+)')
    """Finds the worker id, its first group, in a line of the log."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._server = Server(directory, type(self).__name__)
        self._seats: Sequence[Seat] = ()

    def command(self, port: int) -> list[str]:
        """Return the command line that serves on a port."""
        raise NotImplementedError

    def registration(self, seat: Seat) -> dict[str, Any]:
        """Return the body of POST /workers."""
        return {
            "worker_id": seat.worker_id,
            "model_name": seat.model_name,
            "endpoint": f"http://127.0.0.1/{seat.worker_id}",
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": 8_192,
            "total_kv_blocks": 100_000,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "kv_events_endpoints": {"0": seat.events_endpoint},
            "replay_endpoint": seat.replay_endpoint,
        }

    async def start(self, seats: Sequence[Seat]) -> None:
        """Start the service and register all engines."""
        self._seats = seats
        await self._server.start(self.command(self._server.port), "/health")
        await self.register()
        self._server.log.skip()

    async def register(self) -> None:
        """Register all engines."""
        for seat in self._seats:
            answer = await self._server.client.post("/workers", json=self.registration(seat))
            answer.raise_for_status()

    async def ask(self, seats: Sequence[Seat], prompt: Prompt) -> Answer:
        """Query the overlap of every engine; a service without any answers 503."""
        body = {
            "model_name": seats[0].model_name,
            "token_ids": prompt.token_ids,
            "lora_name": prompt.lora_name,
            "cache_salt": prompt.cache_salt,
        }
        answer = await self._server.client.post("/overlap_scores", json=body)
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return Answer({seat.worker_id: 0 for seat in seats})
        workers = answer.raise_for_status().json()["workers"]
        blocks: dict[int, int] = {}
        for worker in workers:  # a rank that was never registered counts like any other
            held = self.held_blocks(worker)
            blocks[worker["worker_id"]] = blocks.get(worker["worker_id"], 0) + held
        return Answer(blocks, self.doubts(workers))

    def held_blocks(self, worker: dict[str, Any]) -> int:
        """Return the blocks that an answer credits to a worker, on any tier."""
        held: int = max(worker[tier] for tier in TIERS)
        return held

    def doubts(self, workers: list[dict[str, Any]]) -> dict[int, str]:  # noqa: ARG002
        """Return the doubts that an answer states, by worker id."""
        return {}

    def remarks(self) -> list[Remark]:
        """Return the new warnings of its log."""
        return [Remark(line, self._worker_id(line)) for line in self._server.log.warnings()]

    def _worker_id(self, line: str) -> int | None:
        found = self.worker_in_log.search(line)
        return int(found[1]) if found else None

    async def engine_restarted(self, seat: Seat) -> None:
        """Do nothing: a service follows its engines' sockets."""

    async def restart(self) -> None:
        """Kill it, start it, and register all engines again, as an orchestrator does."""
        await self._server.kill()
        await asyncio.sleep(0.5)
        await self._server.start(self.command(self._server.port), "/health")
        await self.register()
        self._server.log.skip()

    async def stop(self) -> None:
        """Kill it."""
        await self._server.close()
