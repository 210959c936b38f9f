"""`kv-router up` as a process of its own, for tests of what users see."""

import asyncio
import re
import sys
from contextlib import asynccontextmanager

from router.runtime.process.settings import AGENT_PREFIX
from support.processes.servers import eventually, free_port

SMALL_MODEL = {f"{AGENT_PREFIX}NUM_LAYERS": "1", f"{AGENT_PREFIX}HIDDEN_SIZE": "64"}
"""The environment in which its workers have a model that takes little time."""


class Up:
    """The command, its output so far, and the processes it started."""

    def __init__(self, *options):
        self.port = free_port()
        self.openai_port = free_port()
        self.output = ""
        self._command = [
            sys.executable, "-m", "router", "up", "--port", str(self.port),
            "--openai-port", str(self.openai_port), *options
        ]  # fmt: skip
        self.process = None
        self._reading = None

    async def start(self):
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read())

    async def _read(self):
        while line := await self.process.stdout.readline():
            self.output += line.decode()

    async def until(self, text):
        """Until it has said so."""

        def is_said():
            assert text in self.output or self.process.returncode is None, self.output
            return text in self.output

        await eventually(is_said)

    async def wait(self):
        await self.process.wait()
        await self._reading
        return self.process.returncode

    def pids(self):
        return {name: int(pid) for name, pid in re.findall(r"^(\S+)\s+\S+://\S+\s+(\d+)\s",
                                                           self.output, re.MULTILINE)}  # fmt: skip


@asynccontextmanager
async def ups():
    """Starts such commands, given their options; they end with it."""
    started = []

    async def start(*options):
        started.append(Up(*options))
        await started[-1].start()
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            if each.process.returncode is None:
                each.process.kill()
            await each.wait()
