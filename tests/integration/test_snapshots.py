"""Routers write snapshots, and are killed while they do."""

import asyncio

import httpx
import pytest

from router.ingest.object_store import CHUNK_BYTES
from router.protocol.values import Tier
from router.runtime.process.settings import id_of_name
from support.processes.processes import Process
from support.processes.proxies import NONE, Faults, Proxy
from support.processes.running import SUBJECTS
from support.processes.servers import NO_TLS, eventually, free_port
from support.values.builders import rank
from support.values.indexing import announced

BLOCKS = 200_000
STREAM = f"OBJ_{SUBJECTS.snapshot_bucket}"
CHUNKS = f"$O.{SUBJECTS.snapshot_bucket}.C.>"


class RouterProcess:
    def __init__(self, directory, nats_url, name):
        port = free_port()
        self.router_id = id_of_name(f"{name}:{port}")
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=60, verify=NO_TLS
        )
        self.process = Process(
            directory, name, "router", "serve",
            **{"nats-url": nats_url, "http-port": port, "name": name, "namespace": "test",
               "drain-s": 0, "snapshot-threshold": 3},
        )  # fmt: skip

    async def holds(self, blocks):
        """Whether it is ready, and exact about the `blocks` blocks of the worker."""
        try:
            ready, view = [await self._client.get(path) for path in ("/ready", "/workers/1")]
        except httpx.HTTPError:
            return False
        if (ready.status_code, view.status_code) != (200, 200):
            return False
        [held] = view.json()["ranks"]
        return held["trust"]["state"] == "exact" and held["held_blocks"] == blocks

    async def metric(self, name):
        text = (await self._client.get("/metrics")).text
        [value] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(value.split()[-1])

    async def close(self):
        await self._client.aclose()
        if self.process.popen.poll() is None:
            self.process.kill()


@pytest.fixture
async def link(nats_server):
    """Between the routers and their bus."""
    async with Proxy(nats_server.port) as link:
        yield link


@pytest.fixture
async def routers(tmp_path, link):
    """The first is the one that writes."""
    made = [RouterProcess(tmp_path, link.url, name) for name in ("one", "two")]
    yield sorted(made, key=lambda router: router.router_id)
    for router in made:
        await router.close()


@pytest.fixture
async def worker(bus):
    async with announced(bus, 1) as worker:
        worker.journals[rank(1)].stored(Tier.HOST, range(1, BLOCKS + 1), None)
        await worker.deliver()
        renewing = asyncio.create_task((await worker.announce()).run())
        yield worker
        renewing.cancel()


async def say_more(worker, blocks):
    """One message each."""
    for number in range(blocks):
        worker.journals[rank(1)].stored(Tier.DEVICE, [BLOCKS + 1 + number], BLOCKS + number)
        await worker.deliver()


async def chunk_count(bus):
    info = await bus.js.stream_info(STREAM, subjects_filter=CHUNKS)
    return sum((info.state.subjects or {}).values())


async def test_router_killed_during_a_snapshot_recovers(bus, link, routers, worker):
    first, second = routers
    chunks = await bus.client.subscribe(CHUNKS)
    link.from_client = Faults(bytes_per_s=1e6)
    await say_more(worker, 3)
    for _ in range(3):
        await chunks.next_msg(timeout=60)
    link.stall()
    first.process.kill()
    link.set_faults(NONE)
    link.resume()
    await eventually(lambda: second.holds(BLOCKS + 3))
    left = await chunk_count(bus)
    assert 0 < left < BLOCKS * 8 / CHUNK_BYTES
    first.process.start()
    await eventually(lambda: first.holds(BLOCKS + 3))
    assert await first.metric("kv_router_snapshots_restored_total") == 0
    await eventually(lambda: first.metric("kv_router_snapshots_written_total"))
    assert await chunk_count(bus) == -(-(BLOCKS + 3) * 8 // CHUNK_BYTES)
    worker.journals[rank(1)].stored(Tier.DEVICE, [BLOCKS + 4], BLOCKS + 3)
    await worker.deliver()
    for router in (first, second):
        router.process.kill()
        router.process.start()
        await eventually(lambda router=router: router.holds(BLOCKS + 4))
        assert await router.metric("kv_router_snapshots_restored_total") == 1
        assert await router.metric("kv_router_snapshot_restored_blocks_total") == BLOCKS + 3
