"""The HTTP API of selection services, which several systems offer."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from ..steps import BLOCK_SIZE, Prompt
from .base import Answer, Seat, Server

TIERS = ("device_blocks", "host_pinned_blocks", "disk_blocks")
"""Each counts what is held in its tier or in a faster one."""


class SelectionService:
    """Engines are registered over HTTP; every engine's overlap can be asked for."""

    title: str
    answers_best_only = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._server = Server(directory, type(self).__name__)
        self._seats: Sequence[Seat] = ()

    def command(self, port: int) -> list[str]:
        """How to run it."""
        raise NotImplementedError

    def registration(self, seat: Seat) -> dict[str, Any]:
        """The body of POST /workers."""
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
        self._seats = seats
        await self._server.start(self.command(self._server.port), "/health")
        await self.register()

    async def register(self) -> None:
        """All engines."""
        for seat in self._seats:
            answer = await self._server.client.post("/workers", json=self.registration(seat))
            answer.raise_for_status()

    async def ask(self, seats: Sequence[Seat], prompt: Prompt) -> Answer:
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
            held = max(worker[tier] for tier in TIERS)
            blocks[worker["worker_id"]] = blocks.get(worker["worker_id"], 0) + held
        return Answer(blocks, self.doubts(workers))

    def doubts(self, workers: list[dict[str, Any]]) -> dict[int, str]:  # noqa: ARG002
        """Where the answer says that it may be wrong."""
        return {}

    async def restart(self) -> None:
        await self._server.kill()
        await asyncio.sleep(0.5)
        await self._server.start(self.command(self._server.port), "/health")
        await self.register()

    async def stop(self) -> None:
        await self._server.close()
