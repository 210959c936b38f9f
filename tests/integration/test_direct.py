"""A router in direct mode, as a process of its own, and its engines: all may be killed.

What the index shows is compared with what the engines hold, per rank.
"""

import asyncio
import itertools
import random
from contextlib import AsyncExitStack, suppress

import httpx
import pytest

from support.engines.engines import names
from support.engines.zmq_engines import EngineProcess, removed, stored
from support.processes.processes import Process
from support.processes.servers import NO_TLS, eventually, free_port

BLOCK_SIZE, CHAIN_BLOCKS = 4, 8


class HoldingEngine:
    """A worker's engine, a process a rank, and what each rank holds: by hash, its block's name."""

    def __init__(self, worker_id, ranks=2):
        self.worker_id = worker_id
        self.ports = [(free_port(), free_port()) for _ in range(ranks)]
        self.ranks = [
            EngineProcess(port=events - dp_rank, replay_port=replay - dp_rank, dp_rank=dp_rank)
            for dp_rank, (events, replay) in enumerate(self.ports)
        ]
        self.held = [{} for _ in self.ranks]
        self._hashes = itertools.count(worker_id << 32)
        self._random = random.Random(worker_id)

    def start(self):
        for rank in self.ranks:
            rank.start()

    def stop(self):
        for rank in self.ranks:
            rank.kill()

    def restart(self, dp_rank):
        self.ranks[dp_rank].restart()
        self.held[dp_rank] = {}

    def work(self, dp_rank):
        """Store a chain of blocks; sometimes evict the end of one."""
        first = self._random.randrange(1 << 30)
        tokens = range(first, first + BLOCK_SIZE * CHAIN_BLOCKS)
        hashes = list(itertools.islice(self._hashes, CHAIN_BLOCKS))
        self.ranks[dp_rank].publish(stored(hashes, list(tokens), block_size=BLOCK_SIZE))
        self.held[dp_rank].update(zip(hashes, names(tokens, block_size=BLOCK_SIZE), strict=True))
        if self._random.random() < 0.5:
            self.ranks[dp_rank].publish(removed(hashes[-2:]))
            for gone in hashes[-2:]:
                del self.held[dp_rank][gone]

    def body(self, **fields):
        sockets = [(f"tcp://127.0.0.1:{e}", f"tcp://127.0.0.1:{r}") for e, r in self.ports]
        return {
            "worker_id": self.worker_id,
            "endpoint": f"http://w{self.worker_id}",
            "block_size": BLOCK_SIZE,
            "data_parallel_size": len(self.ranks),
            "kv_events_endpoints": {str(dp): events for dp, (events, _) in enumerate(sockets)},
            "replay_endpoints": {str(dp): replay for dp, (_, replay) in enumerate(sockets)},
            **fields,
        }


class DirectFleet:
    """A router process, and engines of two ranks each."""

    def __init__(self, directory, engines=3):
        self.port = free_port()
        self.engines = [HoldingEngine(worker_id) for worker_id in range(1, engines + 1)]
        self._options = {"http-port": self.port, "drain-s": 0, "data-dir": directory / "kept"}
        self._directory = directory
        self._stack = AsyncExitStack()

    async def start(self):
        for engine in self.engines:
            self._stack.callback(engine.stop)
            engine.start()
        self.router = Process(self._directory, "router", "router", "serve", **self._options)
        self._stack.callback(self.router.end)
        self.client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", timeout=60, verify=NO_TLS
        )
        self._stack.push_async_callback(self.client.aclose)

    async def close(self):
        await self._stack.aclose()

    async def is_up(self):
        try:
            return (await self.client.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def register(self, engine):
        answer = await self.client.post("/workers", json=engine.body())
        assert answer.status_code == 201, answer.text

    async def workers(self):
        return {w["worker_id"]: w for w in (await self.client.get("/workers")).json()}

    async def index(self):
        """What the router says each rank holds."""
        held = {}
        for scope in (await self.client.get("/dump")).json().values():
            for event in scope["events"]:
                blocks = event["event"]["data"]["stored"]["blocks"]
                key = event["worker_id"], event["event"]["dp_rank"]
                held[key] = {block["block_hash"] for block in blocks}
        return held

    async def is_right(self):
        """All ranks are exact, and the index shows what the engines hold: no more, and no less."""
        try:
            workers = await self.workers()
            index = await self.index()
        except httpx.HTTPError:
            return False
        held = {
            (engine.worker_id, dp_rank): set(held.values())
            for engine in self.engines
            for dp_rank, held in enumerate(engine.held)
            if held
        }
        states = [r["trust"]["state"] for w in workers.values() for r in w["ranks"]]
        everybody = workers.keys() == {engine.worker_id for engine in self.engines}
        return everybody and index == held and set(states) == {"exact"}

    def work(self, times=1):
        for engine in self.engines:
            for dp_rank in range(len(engine.ranks)):
                for _ in range(times):
                    engine.work(dp_rank)


@pytest.fixture
async def fleet(tmp_path):
    fleet = DirectFleet(tmp_path)
    try:
        await fleet.start()
        await eventually(fleet.is_up)
        for engine in fleet.engines:
            await fleet.register(engine)
        fleet.work(20)
        await eventually(fleet.is_right)
        yield fleet
    finally:
        await fleet.close()


async def test_idle_and_busy_engines_restart_without_ghosts(fleet):
    fleet.engines[0].restart(0)
    await eventually(fleet.is_right)
    fleet.engines[1].restart(1)
    fleet.work(10)
    await eventually(fleet.is_right)


async def test_killed_router_restores_workers_and_idle_engines(fleet):
    fleet.router.kill()
    fleet.router.start()
    await eventually(fleet.is_right)
    fleet.work(5)
    await eventually(fleet.is_right)


async def test_changes_during_a_router_outage_are_learned(fleet):
    fleet.router.kill()
    fleet.work(10)
    fleet.engines[0].restart(0)
    fleet.engines[1].restart(0)
    fleet.engines[1].work(0)
    fleet.router.start()
    await eventually(fleet.is_right)


async def test_state_is_kept_when_the_replay_begins_later(fleet):
    """More batches than an engine replays: only the state file knows the first ones."""
    engine = fleet.engines[0]
    for _ in range(2200):
        engine.work(0)
    await eventually(fleet.is_right)
    assert fleet.router.stop() == 0
    fleet.router.start()
    engine.work(0)
    await eventually(fleet.is_right)
    (rank, _) = (await fleet.workers())[1]["ranks"]
    assert rank["engine"]["problem"] is None


async def test_a_worker_removed_under_traffic_is_gone(fleet):
    gone = fleet.engines.pop()
    stop = asyncio.Event()

    async def traffic():
        while not stop.is_set():
            for dp_rank in (0, 1):
                gone.work(dp_rank)
            fleet.work(1)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.005)

    async def requests():
        numbers = itertools.count()
        while not stop.is_set():
            may_be_chosen = not is_gone.is_set()
            body = {"token_ids": list(range(64)), "request_id": f"r{next(numbers)}"}
            answer = await fleet.client.post("/select_and_reserve", json=body)
            assert answer.status_code == 200
            worker_id = answer.json()["worker_id"]
            await fleet.client.delete(f"/reservations/{body['request_id']}")
            assert worker_id != gone.worker_id or may_be_chosen
            answered.append(worker_id)

    is_gone, answered = asyncio.Event(), []
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic())
            group.create_task(requests())
            await eventually(lambda: len(answered) > 50)
            answer = await fleet.client.delete(f"/workers/{gone.worker_id}")
            assert answer.status_code == 200
            is_gone.set()
            assert gone.worker_id not in await fleet.workers()
            answered.clear()
            await eventually(lambda: len(answered) > 50)
            stop.set()
        await eventually(fleet.is_right)
    finally:
        gone.stop()
