"""nats-server, routers as processes and agents without engines, each behind a link of its own.

Every answer of a router that is marked exact is held against what its agents really held.
"""

import asyncio
import gc
import time
from contextlib import AsyncExitStack, suppress
from random import Random

import httpx

from support.processes.edges import HASHES, PROMPTS, Edge
from support.processes.processes import Process
from support.processes.proxies import Proxy
from support.processes.servers import NO_TLS, eventually, free_port

FRESH_S = 1.0
"""How far an answer marked exact may be behind."""


class PlaneRouter:
    """A router process, and what it answers."""

    def __init__(self, directory, name, nats_url, **options):
        port = free_port()
        self.name = name
        self.client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=60, verify=NO_TLS
        )
        options = {"nats-url": nats_url, "http-port": port, "name": name, **options}
        self.process = Process(
            directory, name, "router", "serve", namespace="test", **{"drain-s": 0, **options}
        )

    async def get(self, path):
        answer = await self.client.get(path)
        answer.raise_for_status()
        return answer.json()

    async def is_up(self):
        try:
            return (await self.client.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def overlaps(self, token_ids):
        answer = await self.client.post("/overlap_scores", json={"token_ids": token_ids})
        answer.raise_for_status()
        return answer.json().get("workers", ())

    async def dump(self):
        events = [e for scope in (await self.get("/dump")).values() for e in scope["events"]]
        return {
            (event["worker_id"], event["event"]["dp_rank"]): {
                block["block_hash"] for block in event["event"]["data"]["stored"]["blocks"]
            }
            for event in events
        }

    async def trusted(self):
        """{(worker, rank): (incarnation, trust)}"""
        return {
            (worker["worker_id"], rank["dp_rank"]): (worker["incarnation"], rank["trust"]["state"])
            for worker in await self.get("/workers")
            for rank in worker["ranks"]
        }

    async def metrics(self):
        """Each sample's value, by its whole name."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        samples = [line.rsplit(" ", 1) for line in lines if line and line[0] != "#"]
        return {name: float(value) for name, value in samples}


class EventPlane:
    """All of it. `exact_answers`: how many were marked so; `wrong`: those that should not have."""

    def __init__(self, directory, nats_server, seed=0):
        self.directory = directory
        self.nats_server = nats_server
        self.rng = Random(seed)
        self.routers = []
        self.edges = {}
        self.links = {}
        self.wrong = []
        self.exact_answers = 0
        self._stack = AsyncExitStack()
        self._tasks = []

    async def router(self, **options):
        """One more router, watched from now on."""
        name = f"router-{len(self.routers)}"
        router = PlaneRouter(self.directory, name, await self._link(name), **options)
        self._stack.push_async_callback(router.client.aclose)
        self._stack.callback(router.process.end)
        self.routers.append(router)
        self.spawn(self._watch(router))
        return router

    async def edge(self, worker_id, **fields):
        """One more agent; it holds nothing yet."""
        edge = Edge(await self._link(worker_id), worker_id, **fields)
        self.edges[worker_id] = edge
        edge.start()
        self._stack.push_async_callback(edge.kill)
        return edge

    def spawn(self, coroutine):
        """Let something run until the end."""
        task = asyncio.create_task(coroutine)
        self._tasks.append(task)
        return task

    async def ask(self, router):
        """Ask for one prompt, and note what is wrong with the answer."""
        number = self.rng.randrange(len(PROMPTS))
        asked_s = time.monotonic()
        for row in await router.overlaps(PROMPTS[number]):
            self._check(router, row, HASHES[number], asked_s)

    async def change_for(self, seconds, pause_s=0.02):
        """Let blocks come and go everywhere for a time."""
        changing = [
            asyncio.create_task(edge.change_forever(self.rng, pause_s))
            for edge in self.edges.values()
        ]
        try:
            await asyncio.wait(changing, timeout=seconds)
        finally:
            for task in changing:
                task.cancel()
            await asyncio.wait(changing)

    async def close(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()
        gc.collect()  # what NATS's client left open complains now, not in another test

    @property
    def held(self):
        return {key: held for edge in self.edges.values() for key, held in edge.held.items()}

    async def until_right(self):
        """Every rank is exact, and as its agent holds it: no ghost, nothing lost, on any router."""
        try:
            await eventually(self.is_right, poll_s=0.05)
        except TimeoutError:
            raise AssertionError([await self._differences(r) for r in self.routers]) from None
        if self.wrong:
            raise AssertionError(
                f"{len(self.wrong)} wrong of {self.exact_answers}: {self.wrong[:5]}"
            )

    async def is_right(self):
        return not any([await self._differences(router) for router in self.routers])

    async def _differences(self, router):
        """What speaks against a router, by rank."""
        try:
            trusted, dump = await router.trusted(), await router.dump()
        except httpx.HTTPError as error:
            return {"unreachable": repr(error)}
        held, expected = self.held, {}
        for edge in self.edges.values():
            for rank in edge.ranks:
                expected[edge.worker_id, rank.dp_rank] = edge.incarnation, "exact"
        differences = {
            key: trusted.get(key) for key in expected if trusted.get(key) != expected[key]
        }
        for key in held.keys() | dump.keys():
            ghosts = dump.get(key, set()) - held.get(key, set())
            lost = held.get(key, set()) - dump.get(key, set())
            if ghosts or lost:
                differences[key] = f"{len(ghosts)} ghosts, {len(lost)} lost", trusted.get(key)
        return differences

    async def _link(self, name):
        link = Proxy(self.nats_server.port, seed=self.rng.random())
        self.links[name] = await self._stack.enter_async_context(link)
        return link.url

    async def _watch(self, router):
        """Ask all the time; a router that is away or slow has nothing to answer for."""
        while True:
            with suppress(httpx.HTTPError):
                await self.ask(router)
            await asyncio.sleep(0.02)

    def _check(self, router, row, hashes, asked_s):
        if row["trust"]["state"] != "exact":
            return
        self.exact_answers += 1
        lives = self.edges[row["worker_id"]].lives[row["dp_rank"]]
        past = [life.was(row["trust"]["event_id"], asked_s - FRESH_S) for life in lives]
        found = [_prefix(held, hashes) for held in past if held is not None]
        if row["device_blocks"] not in found:
            self.wrong.append((router.name, row, found, len(lives), asked_s))


def _prefix(held, hashes):
    """How many of the first hashes are held."""
    return next((i for i, each in enumerate(hashes) if each not in held), len(hashes))
