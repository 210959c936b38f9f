"""Routers restarted in turn under load: no request fails, and no booking is lost."""

import asyncio
import itertools
import logging
import time
from contextlib import AsyncExitStack

import httpx
import pytest

from router.client import ClientSettings, Retries, RouterClient, SelectRequest
from router.errors import KvRouterError
from support.fleets.event_plane import PlaneRouter
from support.processes.edges import PROMPTS, Edge
from support.processes.servers import eventually

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
async def fleet(tmp_path, nats_server):
    """Three routers, three workers, and a caller."""
    async with AsyncExitStack() as stack:
        routers = {}
        for number in range(3):
            name = f"router-{number}"
            router = PlaneRouter(tmp_path, name, nats_server.url, **{"drain-s": 1})
            stack.push_async_callback(router.client.aclose)
            stack.callback(router.process.end)
            routers[name] = router
        for worker_id in WORKERS:
            edge = Edge(nats_server.url, worker_id)
            edge.start()
            stack.push_async_callback(edge.kill)
        clients = {}
        for name, router in routers.items():
            over = RouterClient.over_http(str(router.client.base_url), settings=ONCE)
            clients[name] = await stack.enter_async_context(over)
        caller = Caller(clients)
        async with asyncio.TaskGroup() as tasks:
            follows = [tasks.create_task(caller.follow(*each)) for each in routers.items()]
            await eventually(lambda: all(map(caller.is_ready, routers)))
            yield routers, caller
            for task in follows:
                task.cancel()


async def restart_in_turn(routers, caller):
    for name, router in routers.items():
        assert await asyncio.to_thread(router.process.stop) == 0
        await eventually(lambda name=name: not caller.is_ready(name))
        router.process.start()
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
async def test_routers_restarted_in_turn_fail_no_request(fleet):
    routers, caller = fleet
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
