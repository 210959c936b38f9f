"""An engine and the block manager inside it both publish to one agent: routers get a block once a
tier, until it is gone there, whichever of the three restarts.
"""

from contextlib import closing, contextmanager

import pytest
import torch

from router.protocol.values import SCHEME, Identity, Tier
from support.blocks.connectors import BLOCK_SIZE, names_of
from support.blocks.tier_stacks import BLOCK_BYTES, Stacked, disk, host
from support.engines.metrics_server import MetricsServer, vllm_metrics
from support.engines.zmq_engines import Engine, cleared, removed, stored
from support.processes.processes import Process
from support.processes.running import RunningRouter
from support.processes.servers import eventually, free_port
from worker_agent.connector.tier_publisher import TierPublisher

PROMPT = list(range(40))
NAMES = names_of(PROMPT)
OTHERS = names_of(range(500, 512))


def hashes(names):
    return {name.sequence_hash for name in names}


class Manager(Stacked):
    """One with a host tier and a disk tier, whose files outlive it."""

    def __init__(self, directory, port, host_blocks, disk_blocks):
        super().__init__(host(directory, host_blocks), disk(directory, disk_blocks))
        self.news = TierPublisher(f"tcp://127.0.0.1:{port}", Identity(SCHEME, BLOCK_SIZE), 0)
        self.stack.start()
        while not self.stack.is_probed:
            self.settle()

    def step(self):
        self.poll()
        waiting = self.stack.due(self.now_s)
        if waiting:
            self.stack.store(waiting, torch.ones((len(waiting), BLOCK_BYTES), dtype=torch.uint8))

    def poll(self):
        super().poll()
        self.news.publish(self.changes)
        self.changes = []

    def keep(self, names):
        self.stack.offer(names)
        self.settle()

    def held(self):
        """What its pools have, by tier."""
        return {
            level.tier: hashes(
                name
                for name in [*NAMES, *OTHERS]
                if level.store.pool.scan([name.identity]) != [None]
            )
            for level in self.levels
        }


@contextmanager
def running(manager):
    with manager, closing(manager.news):
        yield manager


def reported(names, first=100, **fields):
    """The engine's own event; its blocks are numbered on."""
    numbers = list(range(first, first + len(names)))
    return stored(numbers, PROMPT[: BLOCK_SIZE * len(names)], **fields)


async def held(router):
    """What a router believes by tier; None while it is not exact."""
    if (view := await router.view(7)) is None or view["ranks"][0]["trust"]["state"] != "exact":
        return None
    dump = (await router.client.get("/dump")).json()
    known = {}
    for event in (event for scope in dump.values() for event in scope["events"]):
        blocks = [block["block_hash"] for block in event["event"]["data"]["stored"]["blocks"]]
        known.setdefault(event["storage_tier"], []).extend(blocks)
    assert all(len(blocks) == len(set(blocks)) for blocks in known.values())
    return {tier: set(blocks) for tier, blocks in known.items()}


async def until(router, device, *managers, host_too=()):
    """Until a router knows: what the engine's device has, and what either has below it."""
    expected = {"device": hashes(device), "host_pinned": hashes(host_too), "disk": set()}
    for each in managers:
        expected["host_pinned"] |= each.held()[Tier.HOST]
        expected["disk"] |= each.held()[Tier.DISK]
    expected = {tier: blocks for tier, blocks in expected.items() if blocks}

    async def is_so():
        return await held(router) == expected

    await eventually(is_so)
    return expected


@pytest.fixture
def engine():
    with Engine(topic="kv@w1") as engine:
        yield engine


@pytest.fixture
def agent(tmp_path, nats_server, engine):
    tiers_port = free_port()
    with MetricsServer(vllm_metrics(num_gpu_blocks=50)) as metrics:
        options = {
            "engine": "vllm", "namespace": "test", "worker-id": 7, "http-port": free_port(),
            "nats-url": nats_server.url, "endpoint": "http://engine:8000", "topic": "kv@",
            "zmq": engine.endpoint, "replay": engine.replay_endpoint, "metrics-url": metrics.url,
            "state-dir": tmp_path / "state", "tiers": f"tcp://127.0.0.1:{tiers_port}",
        }  # fmt: skip
        process = Process(tmp_path, "bridge", "worker_agent", "run", **options)
        process.tiers_port = tiers_port
        try:
            yield process
        finally:
            process.end()


async def test_index_stays_exact_after_either_process_restarts(
    tmp_path, nats_server, engine, agent
):
    def manager():
        return running(Manager(tmp_path, agent.tiers_port, host_blocks=4, disk_blocks=12))

    async with RunningRouter(nats_server.url).running() as router:
        with manager() as first:
            await until(router, [], first)  # an engine is followed from its first batch on
            engine.publish(reported(NAMES[:6]))
            first.keep(NAMES[:6])
            known = await until(router, NAMES[:6], first)
            assert (len(known["host_pinned"]), len(known["disk"])) == (4, 6)
            # The engine offloads, too: what both have on the host is there once, until neither has.
            engine.publish(reported(NAMES[:6], medium="CPU"))
            await until(router, NAMES[:6], first, host_too=NAMES[:6])
            first.keep(OTHERS)
            await until(router, NAMES[:6], first, host_too=NAMES[:6])
            engine.publish(removed([102, 103, 104, 105], medium="CPU"), removed([105]))
            await until(router, NAMES[:5], first, host_too=NAMES[:2])
            agent.kill()
            engine.publish(removed([104]), removed([101], medium="CPU"))
            first.keep(NAMES[6:8])
            agent.start()
            await until(router, NAMES[:4], first, host_too=NAMES[:1])
            engine.restart([reported(NAMES[:2])])
            await until(router, NAMES[:2], first)
        with manager() as second:
            assert second.held()[Tier.DISK]
            await until(router, NAMES[:2], second)
            engine.publish(cleared())
            await until(router, [], second)
            second.stack.clear()
            second.settle()
            await until(router, [], second)
            second.keep(NAMES[:1])
            assert (await until(router, [], second))["disk"] == hashes(NAMES[:1])
