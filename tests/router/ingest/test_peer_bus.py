"""Real routers without a bus: what one books weighs at the others, come what may."""

import asyncio
from contextlib import AsyncExitStack
from itertools import permutations

import httpx
import pytest

from router.protocol.replicas import SharedReservation
from support.processes.relays import Relay
from support.processes.running import RunningRouter
from support.processes.servers import eventually, free_port

PROMPT = list(range(40))
WORKER = {"worker_id": 1, "endpoint": "http://w1", "block_size": 4}


class Peers:
    """Routers that know each other's addresses; a link in each direction between any two."""

    def __init__(self, names):
        self._stack = AsyncExitStack()
        self.links = {pair: Relay() for pair in permutations(names, 2)}
        self.routers = {}

    async def __aenter__(self):
        for link in self.links.values():
            await self._stack.enter_async_context(link)
        return self

    async def __aexit__(self, *error):
        await self._stack.aclose()

    async def start(self, name, **fields):
        """Start a router that knows the worker, and wait until it is ready."""
        links = {to: link for (of, to), link in self.links.items() if of == name}
        addresses = ",".join(f"127.0.0.1:{link.port}" for link in links.values())
        router = self.made(name, **{"router_peers": addresses, **fields})
        await self._stack.enter_async_context(router.running())
        for (_, to), link in self.links.items():
            if to == name:
                link.target_port = router.config.http.http_port
        assert (await router.post("/workers", WORKER)).status_code == 201
        await eventually(router.is_ready)
        return router

    def made(self, name, **fields):
        router = RunningRouter("", name=name, use_kv_events=False, **fields)
        self.routers[name] = router
        return router

    async def part(self, *names):
        """Cut these routers off from the others."""
        for pair, link in self.links.items():
            if len({*pair} & {*names}) == 1:
                await link.go_down()

    def heal(self):
        for link in self.links.values():
            link.come_up()

    async def until_equal(self):
        """Wait until each router has exactly what every other has booked."""

        def are_equal():
            live = [each for each in self.routers.values() if each.is_running]
            return all(
                theirs(one, other) == own(other) for one, other in permutations(live, 2)
            )

        await eventually(are_equal)


def own(router) -> dict[str, SharedReservation]:
    tracker = router.service.host.core.tracker
    return {each.request_id: each for each in tracker.all_shared()}


def theirs(router, other) -> dict[str, SharedReservation]:
    replicas = router.service.host.core.foreign.replicas
    return {
        each.request_id: each
        for mirror in replicas
        if mirror.router_id == other.config.router_id
        for each in mirror.reservations
    }


async def load(router):
    (view,) = (await router.client.get("/loads")).json()[0]["loads"]
    return view["potential_prefill_tokens"], view["potential_decode_blocks"]


async def book(router, request_id, tokens=PROMPT):
    body = {"token_ids": tokens, "request_id": request_id}
    answer = await router.post("/select_and_reserve", body)
    assert answer.status_code == 200, answer.text


async def until_loaded(router, expected):
    async def is_loaded():
        return await load(router) == expected

    await eventually(is_loaded)


async def shown(router):
    """The addresses that a router knows, by state."""
    views = (await router.client.get("/ready?verbose")).json().get("peers", [])
    return {each["state"]: each for each in views}


async def test_bookings_of_one_router_count_at_the_other():
    async with Peers("ab") as peers:
        first, second = await peers.start("a"), await peers.start("b")
        await book(first, "x")
        await until_loaded(second, (40, 10))
        await second.post("/reservations/x/prefill_complete", {})
        await until_loaded(first, (0, 10))
        await until_loaded(second, (0, 10))
        await second.client.delete("/reservations/x")
        await until_loaded(first, (0, 0))
        await until_loaded(second, (0, 0))
        (peer,) = (await first.client.get("/ready?verbose")).json()["peers"]
        assert (peer["state"], peer["name"]) == ("connected", "b")
        routers = (await first.client.get("/routers")).json()
        assert [each["name"] for each in routers] == ["a", "b"]
        assert (await first.client.get("/replica_sync/peers")).json() == [peer["address"]]
        assert await first.metric('kv_router_replica_peers{state="connected"}') == 1
        assert await first.metric("kv_router_replica_known") == 1
