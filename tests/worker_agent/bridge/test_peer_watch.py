"""Which of the announced engines an agent names to its own, over a real bus."""

import asyncio

import msgspec

from router.protocol.catalogue import encode_entry, worker_key
from router.protocol.subjects import Subjects
from router.runtime.bus.connection import connection
from router.runtime.bus.kv_lease import KvLease
from support.processes.servers import eventually
from support.values.builders import announcement
from worker_agent.bridge import peer_watch
from worker_agent.bridge.engine_tiers import EngineTiers
from worker_agent.bridge.peer_watch import PeerWatch
from worker_agent.operations.messages import (
    MAX_NAMED_PEERS,
    EngineCommand,
    EngineReply,
    NamePeers,
    PeersNamed,
)

SUBJECTS = Subjects("test")


class Engine:
    """What an engine was named, and how often it was asked."""

    def __init__(self):
        self.named, self.asked = [], 0

    async def serve(self, reader, writer):
        self.asked += 1
        command = msgspec.json.decode(await reader.readline(), type=EngineCommand)
        if isinstance(command, NamePeers):
            self.named.append(command)
        revision = self.named[-1].revision if self.named else ""
        reply = msgspec.Raw(msgspec.json.encode(PeersNamed([], revision)))
        writer.write(msgspec.json.encode(EngineReply(reply)) + b"\n")
        writer.close()


def shares(worker_id):
    """The engine has vLLM's own P2P tier as well, which is no place for the connector."""
    addresses = [f"vllm-p2p://engine:{worker_id}", f"tcp://engine:{worker_id}"]
    return announcement(worker_id, block_addresses={0: addresses})


async def test_of_many_engines_each_round_names_the_same(nats_server, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_watch, "ROUND_S", 0.01)
    engine, at = Engine(), f"{tmp_path}/control"
    async with (
        await asyncio.start_unix_server(engine.serve, at, limit=1 << 20),
        connection(nats_server.url, "test", lambda _: None) as bus,
    ):
        for worker_id in range(1, MAX_NAMED_PEERS + 9):
            entry = shares(worker_id)
            lease = KvLease(bus.js, SUBJECTS, worker_key(worker_id), entry.incarnation)
            await lease.look()
            await lease.claim(encode_entry(entry))
        watch = PeerWatch(EngineTiers(1, {0: [f"unix://{at}"]}), shares(1))
        watching = asyncio.create_task(watch.run(bus, SUBJECTS))
        rounds = 3  # All are read after two.
        await eventually(lambda: engine.asked >= len(engine.named) + rounds)
        before, asked = list(engine.named), engine.asked
        await eventually(lambda: engine.asked >= asked + rounds)
        assert engine.named == before
        nearest = sorted(range(2, MAX_NAMED_PEERS + 9), key=lambda each: each ^ 1)
        assert before[-1].addresses == [
            f"tcp://engine:{each}" for each in nearest[:MAX_NAMED_PEERS]
        ]
        watching.cancel()
