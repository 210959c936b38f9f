"""Dynamo's KV router in its own runtime, from PyPI: workers with its publisher, and leases.

Each engine has a Dynamo worker beside it, whose publisher follows the engine's socket, counts the
copies of blocks and keeps an index of its own, from which a restarted router recovers. An engine
that dies takes its worker with it: the next one has another instance id.
"""

import asyncio
import json
import os
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from router.tools.conformance.steps import Prompt
from router.tools.conformance.systems.base import Answer, Log, Remark, Seat, StartError

from .dynamo import MARKS
from .environments import BENCHMARKS, python_of

PROGRAM = Path(__file__).with_name("dynamo_process.py")
ANSWER_S = 120.0
LINE_BYTES = 1 << 24
TIERS = ("device_blocks", "host_pinned_blocks", "disk_blocks")
ROUTINE = re.compile(r"(Adding|Removing) worker")
WORKER = re.compile(r'worker_id[=:] ?"?(\d+)')


class DynamoProcess:
    """One process of the fleet."""

    def __init__(self, directory: Path, role: str, name: str) -> None:
        self._role = role
        self.log = Log(directory / f"dynamo-{name}.log")
        self.log.path.touch()
        self._environment = {
            "PATH": os.environ["PATH"],
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYN_EVENT_PLANE": "zmq",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
        }
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()

    async def load(self) -> None:
        """Start it, unless it is; it imports Dynamo, and waits."""
        if self._process is not None and self._process.returncode is None:
            return
        python = python_of(BENCHMARKS / ".peer-venv", BENCHMARKS / "peer-requirements.txt")
        with self.log.path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                python, "-P", PROGRAM, self._role, env=self._environment,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                limit=LINE_BYTES,
            )  # fmt: skip

    async def start(self, described: list[str]) -> list[int]:
        """Its first answer: the ids of workers."""
        await self.load()
        return await self.ask(*described)

    async def ask(self, *call: object):
        async with self._asking:
            self._process.stdin.write(json.dumps(call).encode() + b"\n")
            await self._process.stdin.drain()
            return await self._answer()

    async def _answer(self):
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        if not line:
            raise StartError(f"a process died; see {self.log.path}")
        return json.loads(line)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class DynamoRuntime:
    """The workers of all engines, and one router process."""

    title = "Dynamo runtime 1.6.1"
    answers_best_only = False
    marks = MARKS
    skips = frozenset(
        {
            "an engine restarts, its first batches unseen",
            "engine: 20, restart, 40 of which 20 before we reconnect, no replay",
            "router: kill −9, 10 batches meanwhile, then idle, replay",
        }
    )
    """A worker starts with its engine and outlives the router: its publisher misses none."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[DynamoProcess] = []
        self._router = self._process("router", "router")
        self._lives: dict[int, list[DynamoProcess]] = {}
        """Processes of engines that restart, by worker id: this life's, and that of the next."""
        self._instances: dict[int, int] = {}
        """The worker id of every instance id; older ones of an engine come first."""

    def _process(self, role: str, name: str) -> DynamoProcess:
        self._processes.append(DynamoProcess(self._directory, role, name))
        return self._processes[-1]

    async def start(self, seats: Sequence[Seat]) -> None:
        shared = [seat for seat in seats if not seat.restarts]
        await self._start_workers(self._process("workers", "workers"), shared)
        restarting = [seat for seat in seats if seat.restarts]
        await asyncio.gather(*map(self._begin_life, restarting))
        await self._start_router()
        await asyncio.gather(*[self._lives[seat.worker_id][1].load() for seat in restarting])

    async def _begin_life(self, seat: Seat) -> None:
        """Start the worker of an engine; the process of its next life only has to be started."""
        lives = self._lives.setdefault(seat.worker_id, [])
        while len(lives) < 2:
            lives.append(self._process("workers", f"worker-{len(self._processes)}"))
        await self._start_workers(lives[0], [seat])

    async def _start_workers(self, process: DynamoProcess, seats: Sequence[Seat]) -> None:
        instances = await process.start([seat.events_endpoint for seat in seats])
        self._instances |= dict(zip(instances, (s.worker_id for s in seats), strict=True))

    async def _start_router(self) -> None:
        """Until it has found the last instance of every engine."""
        await self._router.start([])
        wanted = set({worker: instance for instance, worker in self._instances.items()}.values())
        async with asyncio.timeout(ANSWER_S):
            while wanted - {row["worker_id"] for row in await self._overlap(Prompt((0,)))}:
                await asyncio.sleep(0.1)

    async def _overlap(self, prompt: Prompt) -> list[dict[str, int]]:
        asked = prompt.token_ids, prompt.lora_name, prompt.cache_salt
        return await self._router.ask("overlap", *asked)

    async def ask(self, seats: Sequence[Seat], prompt: Prompt) -> Answer:
        """Of each engine's last instance: an older one is gone when its lease is."""
        held = {
            row["worker_id"]: max(row[tier] for tier in TIERS)
            for row in await self._overlap(prompt)
        }
        current = {worker: instance for instance, worker in self._instances.items()}
        return Answer({s.worker_id: held.get(current[s.worker_id], 0) for s in seats})

    def remarks(self) -> list[Remark]:
        """Of the router and of all workers."""
        lines = [line for process in self._processes for line in process.log.warnings()]
        return [Remark(line, self._worker(line)) for line in lines if not ROUTINE.search(line)]

    def _worker(self, line: str) -> int | None:
        found = WORKER.search(line)
        return self._instances.get(int(found[1])) if found else None

    async def engine_restarted(self, seat: Seat) -> None:
        """Its worker died with it; the next one has another instance id."""
        await self._lives[seat.worker_id].pop(0).kill()
        await self._begin_life(seat)

    async def restart(self) -> None:
        """The router alone; workers live on."""
        await self._router.kill()
        await self._start_router()

    async def stop(self) -> None:
        async with AsyncExitStack() as stack:
            for process in self._processes:
                stack.push_async_callback(process.kill)
