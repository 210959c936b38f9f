"""Real Dynamo workers and routers in processes of their own, of any version."""

import asyncio
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

PROGRAM = Path(__file__).parent / "dynamo_process.py"
ANSWER_S = 120.0


class DynamoProcess:
    """One process; `started`: what it answered first, a worker its id."""

    def __init__(self, process):
        self._process = process
        self.started = None

    async def ask(self, *call):
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.answer()

    async def answer(self):
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        assert line, "the process died; its log says why"
        return json.loads(line)


class DynamoFleet:
    """Dynamo of one version, on one NATS server, its discovery in a folder."""

    def __init__(self, python, nats_url, directory):
        self._python = python
        self._directory = directory
        self._count = 0
        self._environment = {
            "PATH": os.environ["PATH"],
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYN_EVENT_PLANE": "nats",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "NATS_SERVER": nats_url,
        }

    @asynccontextmanager
    async def running(self, role, mode):
        """A worker or a router, killed in the end."""
        self._count += 1
        with (self._directory / f"{role}-{self._count}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                self._python,
                str(PROGRAM),
                role,
                mode,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
            )
        try:
            running = DynamoProcess(process)
            running.started = await running.answer()
            yield running
        finally:
            process.kill()
            await process.wait()

    def logs(self):
        """The end of what each process said."""
        return {p.name: p.read_text()[-2000:] for p in sorted(self._directory.glob("*.log"))}
