"""Routers restarted or upgraded in turn under load: no request fails, no booking is lost."""

import asyncio
import itertools
import logging
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from router.client import ClientSettings, Retries, RouterClient, SelectRequest
from router.errors import KvRouterError
from support.fleets.event_plane import PlaneRouter
from support.processes.edges import PROMPTS, Edge
from support.processes.processes import Fleet
from support.processes.servers import eventually

OLD_WORKER, OLD_PROMPT = (
    9,
    list(b"What the earlier version has computed is found. " * 2),
)

log = logging.getLogger(__name__)

WORKERS = (1, 2, 3)
REQUESTS_PER_S = 500
NOTICE_S = 0.05
"""Time between two looks at each router's readiness, as a load balancer takes them."""

ONCE = ClientSettings(retries=Retries(attempts=1))
"""Nothing is tried again: what a router does not answer has failed."""


class Caller:
    """Requests to the routers that say that they are ready, in turn; `failed`: why, one each."""

    def __init__(self, clients):
        self._clients = clients
        self._ready = {}
        self._turns = itertools.count()
        self.finished = 0
        self.failed = []

    async def follow(self, name, router):
        """Note for ever whether a router is ready."""
        while True:
            try:
                is_ready = (await router.client.get("/ready")).status_code == 200
            except httpx.HTTPError:
                is_ready = False
            if is_ready:
                self._ready[name] = True
            else:
                self._ready.pop(name, None)
            await asyncio.sleep(NOTICE_S)

    def is_ready(self, name):
        return name in self._ready

    async def request(self, request_id, held_s):
        """Book, hold for a time, free; at another router, if this one has left."""
        try:
            name = await self.book(request_id)
            await asyncio.sleep(held_s)
            if not await self.free(request_id, name):
                self.failed.append(f"{request_id}: booked at {name}, unknown at its end")
        except (KvRouterError, OSError) as error:
            self.failed.append(f"{request_id}: {error!r}")
        self.finished += 1

    async def book(self, request_id):
        name = self._next()
        prompt = PROMPTS[next(self._turns) % len(PROMPTS)]
        request = SelectRequest(token_ids=prompt, request_id=request_id)
        await self._clients[name].select_and_reserve(request)
        return name

    async def free(self, request_id, name=None):
        at = name if name in self._ready else self._next()
        return await self._clients[at].free(request_id)

    def _next(self):
        ready = list(self._ready)
        return ready[next(self._turns) % len(ready)]


@pytest.fixture
async def started(tmp_path, nats_server):
    """Starts three routers of a version, with three workers of this one; and a caller."""
    async with AsyncExitStack() as stack:

        async def start(tree=None):
            routers, clients = {}, {}
            for name in ("router-0", "router-1", "router-2"):
                options = {"drain-s": 1, "data-dir": tmp_path / f"{name}-data", "tree": tree}
                router = PlaneRouter(tmp_path, name, nats_server.url, **options)
                stack.push_async_callback(router.client.aclose)
                stack.callback(router.process.end)
                over = RouterClient.over_http(str(router.client.base_url), settings=ONCE)
                clients[name] = await stack.enter_async_context(over)
                routers[name] = router
            for worker_id in WORKERS:
                edge = Edge(nats_server.url, worker_id)
                edge.start()
                stack.push_async_callback(edge.kill)
            caller = Caller(clients)
            for each in routers.items():
                follow = asyncio.create_task(caller.follow(*each))
                stack.push_async_callback(ended, follow)
            await eventually(lambda: all(map(caller.is_ready, routers)), timeout_s=500)
            return routers, caller

        yield start


async def ended(task):
    task.cancel()
    await asyncio.wait([task])


async def restart_in_turn(routers, caller):
    for name, router in routers.items():
        assert await asyncio.to_thread(router.process.stop) == 0
        await eventually(lambda name=name: not caller.is_ready(name))
        router.process.tree = None
        await asyncio.to_thread(router.process.start)
        await eventually(lambda name=name: caller.is_ready(name))


async def load(caller, requests_per_s, stop):
    """Send requests at a rate until `stop`, as far as this machine can, and log the rate."""
    first_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in itertools.count():
            if stop.is_set():
                break
            tasks.create_task(caller.request(f"short-{number}", held_s=0.1))
            await asyncio.sleep(max(0, first_s + number / requests_per_s - time.monotonic()))
    log.info("%d requests, %.0f a second", number, number / (time.monotonic() - first_s))


async def booked(router):
    """The number of bookings that a router counts, its own and the others'."""
    scopes = await router.get("/loads")
    return sum(rank["active_requests"] for scope in scopes for rank in scope["loads"])


@pytest.mark.long
async def test_routers_restarted_in_turn_fail_no_request(started):
    await restart_under_load(*await started())


@pytest.mark.upgrade
async def test_routers_upgraded_in_turn_fail_no_request(started, tmp_path, nats_server):
    """From the version in `UPGRADE_TREE`; so is an agent, which is not upgraded."""
    tree = Path(os.environ["UPGRADE_TREE"])
    routers, caller = await started(tree)
    fleet = Fleet(tmp_path, nats_server.url)
    try:
        fleet.add_worker(OLD_WORKER, namespace="test", tree=tree)
        await eventually(lambda: answers(fleet))
        await fleet.complete(OLD_WORKER, 0, OLD_PROMPT)
        for router in routers.values():
            await eventually(lambda router=router: knows(router))
        await restart_under_load(routers, caller)
        for router in routers.values():
            await eventually(lambda router=router: knows(router))
    finally:
        await fleet.close()


async def answers(fleet):
    try:
        return (await fleet.client.get(f"{fleet.endpoints[OLD_WORKER]}/health")).is_success
    except httpx.HTTPError:
        return False


async def knows(router):
    """Whether a router has the blocks of the earlier version's agent, exactly."""
    rows = {row["worker_id"]: row for row in await router.overlaps(OLD_PROMPT)}
    row = rows.get(OLD_WORKER)
    return row and row["device_blocks"] > 0 and row["trust"]["state"] == "exact"


async def restart_under_load(routers, caller):
    held = [f"held-{number}" for number in range(12)]
    for request_id in held:
        await caller.book(request_id)
    stop = asyncio.Event()
    loading = asyncio.create_task(load(caller, REQUESTS_PER_S, stop))
    await restart_in_turn(routers, caller)
    stop.set()
    await loading
    assert caller.failed == []
    for router in routers.values():
        await eventually(lambda router=router: counts(router, len(held)))
    assert all([await caller.free(request_id) for request_id in held])
    for router in routers.values():
        await eventually(lambda router=router: counts(router, 0))


async def counts(router, number):
    return await booked(router) == number
