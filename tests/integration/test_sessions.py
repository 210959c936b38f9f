"""Clients that come and go between two routers which share their sessions in a real Redis, and the
death of one of them: no session is ever served by two workers.
"""

import asyncio
import random
from contextlib import ExitStack, suppress

import httpx
import pytest

from support.processes.processes import Process
from support.processes.servers import eventually, free_port

WORKERS, SESSIONS, CLIENTS, TURNS = 6, 12, 4, 6


@pytest.fixture
async def client():
    async with httpx.AsyncClient(timeout=60) as client:
        yield client


async def started(client, stack, directory, name, redis_port):
    """A router, by its URL, with the workers of all routers; it knows nothing of them."""
    port = free_port()
    settings = {
        "name": name, "http-port": port, "drain-s": 0, "overlap-score-weight": 0,
        "redis-url": f"redis://127.0.0.1:{redis_port}/0", "redis-timeout-s": 10,
        "session-affinity-ttl-s": 600, "router-temperature": 100,
    }  # fmt: skip
    process = Process(directory, name, "router", "serve", **settings)
    stack.callback(process.end)
    url = f"http://127.0.0.1:{port}"

    async def is_up():
        try:
            return (await client.get(f"{url}/health")).status_code == 200
        except httpx.HTTPError:
            return False

    await eventually(is_up)
    for worker_id in range(WORKERS):
        # A server that answers, as workers have one: no engine is asked in this test.
        body = {"worker_id": worker_id, "endpoint": url, "block_size": 4}
        assert (await client.post(f"{url}/workers", json=body)).status_code == 201
    return process, url


class Conversations:
    """Every session has several clients, which ask at whichever router lives. `homes`: where each
    was sent; `half`: set once half of all was asked.
    """

    def __init__(self, client, urls):
        self.client = client
        self.urls = urls
        self.homes = {session: [] for session in range(SESSIONS)}
        self.half = asyncio.Event()
        self.go_on = asyncio.Event()
        self.asked_at_dead = 0

    async def all(self):
        names = [(session, number) for session in range(SESSIONS) for number in range(CLIENTS)]
        async with asyncio.TaskGroup() as group:
            for session, number in names:
                group.create_task(self.talk(session, number))

    async def talk(self, session, number):
        """The first half beside all other callers, the second once one router has died."""
        choose = random.Random(f"{session} {number}")
        for turn in range(TURNS):
            if turn == TURNS // 2:
                self.half.set()
                await self.go_on.wait()
            await self.ask(session, f"{session}.{number}.{turn}", choose)

    async def ask(self, session, request_id, choose):
        body = {"token_ids": [session] * 9, "session_id": f"s{session}", "request_id": request_id}
        url, other = choose.sample(self.urls, 2)
        try:
            answer = await self.client.post(f"{url}/select_and_reserve", json=body)
        except httpx.HTTPError:
            self.asked_at_dead += 1
            url = other
            answer = await self.client.post(f"{url}/select_and_reserve", json=body)
        assert answer.status_code == 200, answer.text
        self.homes[session].append(answer.json()["worker_id"])
        with suppress(httpx.HTTPError):
            await self.client.delete(f"{url}/reservations/{request_id}")


async def test_session_keeps_one_worker_across_routers_and_restarts(tmp_path, redis_port, client):
    with ExitStack() as stack:
        started_routers = [
            await started(client, stack, tmp_path, name, redis_port) for name in ("a", "b")
        ]
        (dies, _), (_, heir) = started_routers
        talks = Conversations(client, [url for _, url in started_routers])
        talking = asyncio.create_task(talks.all())
        await talks.half.wait()
        dies.kill()  # while others are still in their first half, or wait
        talks.go_on.set()
        await talking
        assert talks.asked_at_dead > 0
        assert {len(homes) for homes in talks.homes.values()} == {CLIENTS * TURNS}
        assert {len(set(homes)) for homes in talks.homes.values()} == {1}
        assert len({homes[0] for homes in talks.homes.values()}) > 1
        _, reborn = await started(client, stack, tmp_path, "c", redis_port)
        for session, homes in talks.homes.items():
            for url in (heir, reborn):
                body = {"token_ids": [1] * 9, "session_id": f"s{session}"}
                chosen = (await client.post(f"{url}/select", json=body)).json()
                assert chosen["worker_id"] == homes[0]
