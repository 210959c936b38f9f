"""vllm-router with its kv_aware policy, from PyPI.

It has no API for overlaps. It logs what it credits to the worker it chose, so a question is a
completion request: one token from workers that answer at once, with all tiers credited in full.
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from router.tools.conformance.corpus import SCENARIOS
from router.tools.conformance.steps import BLOCK_SIZE, Marks, Prompt
from router.tools.conformance.systems.base import (
    COLOURS,
    Answer,
    Remark,
    Seat,
    Server,
    free_port,
)

from .environments import BENCHMARKS, python_of
from .http_workers import HttpWorkers

MODEL = "corpus"
DECISION = re.compile(
    r'KV prefix decision .*worker="(?P<url>[^"]+)".*credited_prefix_tokens=(?P<tokens>\d+)'
)
LOGGED_S = 2.0
UNKNOWN_BLOCK = [2**31 - 1] * BLOCK_SIZE


class VllmRouter:
    """vllm-router: it gets its engines on the command line, so a restart needs nothing else."""

    title = "vllm-router 0.1.17"
    answers_best_only = True
    marks = Marks()
    skips = frozenset(each.name for each in SCENARIOS if each.engines[0].kind == "sglang")
    """It is a router of vLLM engines."""

    def __init__(self, directory: Path) -> None:
        self._server = Server(directory, "vllm-router")
        self._workers = HttpWorkers()
        self._command: list[str] = []
        self._urls: dict[str, Seat] = {}
        self._asking = asyncio.Lock()

    async def start(self, seats: Sequence[Seat]) -> None:
        urls = await self._workers.start(len(seats))
        self._urls = dict(zip(urls, seats, strict=True))
        self._command = self._command_line()
        await self._server.start(self._command, "/readiness")
        self._server.log.skip()

    def _command_line(self) -> list[str]:
        python = python_of(
            BENCHMARKS / ".vllm-router-venv", BENCHMARKS / "vllm-router-requirements.txt"
        )
        sources = [f"--kv-event-source={url}={s.events_endpoint}" for url, s in self._urls.items()]
        replays = [
            f"--kv-event-replay-source={url}={seat.replay_endpoint}"
            for url, seat in self._urls.items()
            if seat.replay_endpoint
        ]
        return [
            str(python), "-m", "vllm_router.launch_router", "--policy=kv_aware",
            f"--port={self._server.port}", f"--kv-event-block-size={BLOCK_SIZE}",
            f"--kv-event-model={MODEL}", "--kv-penalty-host=1", "--kv-penalty-external=1",
            "--kv-penalty-disk=1", "--log-level=debug",
            f"--prometheus-port={free_port()}", "--worker-startup-check-interval=1",
            "--worker-urls", *self._urls, *sources, *replays,
        ]  # fmt: skip

    async def ask(self, seats: Sequence[Seat], prompt: Prompt) -> Answer:
        token_ids = [*prompt.token_ids, *UNKNOWN_BLOCK]  # the last block is never credited
        body = {"model": prompt.lora_name or MODEL, "prompt": token_ids, "max_tokens": 1}
        names = {"lora_name": prompt.lora_name, "cache_salt": prompt.cache_salt}
        body |= {key: name for key, name in names.items() if name is not None}
        async with self._asking:  # decisions in its log name no request
            said = self._server.path.stat().st_size
            (await self._server.client.post("/v1/completions", json=body)).raise_for_status()
            url, tokens = await self._decision(said)
        chosen = self._urls[url]
        if chosen not in seats or not tokens:
            return Answer({seat.worker_id: 0 for seat in seats})
        return Answer({chosen.worker_id: tokens // BLOCK_SIZE})

    async def _decision(self, said: int) -> tuple[str, int]:
        for _ in range(int(LOGGED_S / 0.01)):
            with self._server.path.open("rb") as log:
                log.seek(said)
                found = DECISION.search(COLOURS.sub("", log.read().decode(errors="replace")))
            if found:
                return found["url"], int(found["tokens"])
            await asyncio.sleep(0.01)
        raise RuntimeError(f"vllm-router logged no decision: {self._server.path}")

    def remarks(self) -> list[Remark]:
        """Most of its lines name the worker's URL; those about unreadable batches name none."""
        return [Remark(line, self._worker_id(line)) for line in self._server.log.warnings()]

    def _worker_id(self, line: str) -> int | None:
        named = [seat.worker_id for url, seat in self._urls.items() if url in line]
        return named[0] if named else None

    async def engine_restarted(self, seat: Seat) -> None:
        """Nothing: it follows its engines' sockets."""

    async def restart(self) -> None:
        await self._server.kill()
        await self._server.start(self._command, "/readiness")
        self._server.log.skip()

    async def stop(self) -> None:
        await self._server.close()
        await self._workers.stop()
