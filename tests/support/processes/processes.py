"""Routers and agents as processes of their own, to be killed."""

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx

from support.processes.forking import template
from support.processes.servers import NO_TLS, eventually, free_port, freeze

SMALL_MODEL = {
    "num-layers": 2, "hidden-size": 64, "num-heads": 4, "num-kv-heads": 2, "max-model-len": 2048,
}  # fmt: skip


def processor_s(pid):
    """The processor time of a process, in hundredths of a second."""
    cells = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, cells[11:13])) / os.sysconf("SC_CLK_TCK")


class Process:
    """`python -m module …`, with its output in a file; forked, unless it shall import all anew.

    `program`: a file that is run instead, and knows the module. `tree`: a checkout of another
    version, whose modules are run; None: this one's.
    """

    def __init__(
        self,
        directory,
        label,
        module,
        command,
        *,
        is_forked=True,
        program=None,
        tree=None,
        **options,
    ):
        self.tree = tree
        self.log = directory / f"{label}.log"
        self._module = module
        self._arguments = [command, *(f"--{key}={value}" for key, value in options.items())]
        self._is_forked = is_forked
        self._program = program
        self.popen = None
        self.start()

    def start(self):
        if self._is_forked and self.tree is None:
            self.popen = template(self._module).fork(self._arguments, self.log, self._program)
            return
        command = [sys.executable, "-m", self._module, *self._arguments]
        paths = {} if self.tree is None else {"PYTHONPATH": str(self.tree)}
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.tree, env={**os.environ, **paths}
            )

    def kill(self):
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def end(self):
        """Kill it, unless that has been done."""
        if self.popen.poll() is None:
            self.kill()

    def pause(self):
        freeze(self.popen.pid)

    def go_on(self):
        self.popen.send_signal(signal.SIGCONT)

    def stop(self):
        self.popen.terminate()
        return self.popen.wait(timeout=60)


class Fleet:
    """A router and agents on a given bus. `command`: what starts the router."""

    def __init__(self, directory, nats_url, command="serve", **router_options):
        self.directory = directory
        self.nats_url = nats_url
        self._command = command
        self.router_options = router_options
        self.router_port = free_port()
        self.router = None
        self.workers = {}
        self.endpoints = {}
        self.client = httpx.AsyncClient(timeout=60, verify=NO_TLS)
        self.scheme = "http"  # of agents
        self._ids = itertools.count()
        self._reserved = []
        self._stack = ExitStack()

    async def start(self, workers, dp_size=1, **options):
        self.router = self._process(
            "router", "router", self._command,
            **{"nats-url": self.nats_url, "http-port": self.router_port, "name": "router",
               "drain-s": 0, **self.router_options},
        )  # fmt: skip
        for worker_id in range(1, workers + 1):
            self.add_worker(worker_id, dp_size, **options)
        await self.until_ready(workers)

    def add_worker(self, worker_id, dp_size=1, **options):
        port = free_port()
        self.endpoints[worker_id] = f"{self.scheme}://127.0.0.1:{port}"
        self.workers[worker_id] = self._process(
            f"worker-{worker_id}", "worker_agent", "run",
            **{"nats-url": self.nats_url, "http-port": port, "worker-id": worker_id,
               "data-parallel-size": dp_size, **SMALL_MODEL, **options},
        )  # fmt: skip

    def _process(self, label, module, command, **options):
        process = Process(self.directory, label, module, command, **options)
        self._stack.callback(process.end)
        return process

    async def close(self):
        await self.client.aclose()
        self._stack.close()

    async def until_ready(self, workers):
        async def ready():
            try:
                answer = await self.client.get(f"{self.url}/ready")
            except httpx.HTTPError:
                return False
            return answer.status_code == 200 and answer.json()["schedulable_workers"] == workers

        await eventually(ready)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.router_port}"

    async def get(self, path):
        answer = await self.client.get(f"{self.url}{path}")
        answer.raise_for_status()
        return answer.json()

    async def worker_ids(self):
        return [worker["worker_id"] for worker in await self.get("/workers")]

    async def select(self, token_ids, path="/select", **fields):
        body = {"token_ids": token_ids, **fields}
        answer = await self.client.post(f"{self.url}{path}", json=body)
        answer.raise_for_status()
        return answer.json()

    async def ask(self, token_ids, max_tokens=4, others_running=0):
        """Place a request and send it there: the decision, and the engine's answer.

        It is freed when some more have been placed, so that placing has load to weigh.
        """
        request_id = f"r{next(self._ids)}"
        decision = await self.select(token_ids, "/select_and_reserve", request_id=request_id)
        self._reserved.append(request_id)
        answer = await self.complete(
            decision["worker_id"], decision["dp_rank"], token_ids, max_tokens
        )
        while len(self._reserved) > others_running:
            await self.client.delete(f"{self.url}/reservations/{self._reserved.pop(0)}")
        return decision, answer

    async def complete(self, worker_id, dp_rank, token_ids, max_tokens=4, **fields):
        body = {"prompt": token_ids, "max_tokens": max_tokens, "return_token_ids": True}
        answer = await self.client.post(
            f"{self.endpoints[worker_id]}/v1/completions",
            json={**body, **fields},
            headers={"x-data-parallel-rank": str(dp_rank)},
        )
        answer.raise_for_status()
        return answer.json()

    async def held_by_workers(self):
        """What the agents say they hold: {(worker, rank): hashes}."""
        held = {}
        for endpoint in self.endpoints.values():
            dump = json.loads((await self.client.get(f"{endpoint}/dump")).content)
            for rank, tiers in dump["ranks"].items():
                if tiers["device"]:
                    held[dump["worker_id"], int(rank)] = set(tiers["device"])
        return held

    async def held_by_index(self):
        """What the router believes."""
        held = {}
        for scope in (await self.get("/dump")).values():
            for event in scope["events"]:
                key = event["worker_id"], event["event"]["dp_rank"]
                blocks = event["event"]["data"]["stored"]["blocks"]
                held[key] = {block["block_hash"] for block in blocks}
        return held

    async def is_drained(self):
        try:
            return await self.held_by_workers() == await self.held_by_index()
        except httpx.HTTPError:
            return False

    async def until_drained(self):
        await eventually(self.is_drained)

    async def all_exact(self):
        workers = await self.get("/workers")
        return all(r["trust"]["state"] == "exact" for w in workers for r in w["ranks"])


async def is_ready(url):
    """Whether the process at a URL says so; for `eventually`."""
    try:
        async with httpx.AsyncClient(verify=NO_TLS) as client:
            return (await client.get(f"{url}/ready")).status_code == 200
    except httpx.HTTPError:
        return False
