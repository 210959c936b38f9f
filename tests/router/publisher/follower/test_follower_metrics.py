"""What followers count, as Prometheus reads it."""

import asyncio

import zmq
from prometheus_client import CollectorRegistry

from router.protocol.values import Rank
from router.publisher.batch_order.address import EngineAddress
from router.publisher.feed.pacing import Pacing
from router.publisher.follower.follower import EngineFollower, FollowerSettings
from router.publisher.follower.follower_metrics import expose_followers
from router.publisher.follower.loop_slices import SliceScheduler
from router.publisher.journal.journal import EventJournal
from router.publisher.normalizer.normalizer import Normalizer
from support.engines.zmq_engines import Engine, stored
from support.values.builders import IDENTITY


async def test_counts_of_two_ranks(eventually):
    pacing, turns, followers = Pacing(), SliceScheduler(), []
    registry = CollectorRegistry()
    expose_followers(registry, lambda: followers)
    assert registry.get_sample_value("kv_engine_known_blocks", {}) is None

    def read(name, dp_rank, **labels):
        names = {"worker_id": "7", "dp_rank": str(dp_rank), **labels}
        return registry.get_sample_value(f"kv_engine_{name}", names)

    with Engine() as engine, Engine(has_replay=False, dp_rank=1) as other, zmq.Context() as context:
        addresses = [
            EngineAddress(engine.endpoint, engine.replay_endpoint),
            EngineAddress(f"tcp://127.0.0.1:{other.port + 1}"),
        ]
        for dp_rank, address in enumerate(addresses):
            journal = EventJournal(Rank(7, dp_rank), 1, IDENTITY)
            normalizer = Normalizer(journal, IDENTITY)
            settings = FollowerSettings(address)
            followers.append(
                EngineFollower(
                    Rank(7, dp_rank), journal, normalizer, settings, lambda _: None, pacing, turns
                )
            )
        tasks = [asyncio.create_task(follower.run(context)) for follower in followers]
        try:
            await eventually(lambda: read("condition", 0, condition="following") == 1)
            await eventually(lambda: read("condition", 1, condition="blind") == 1)
            engine.publish(stored([1], [1] * 4), {"type": "Strange"})
            engine.publish_payload(b"\xc1")
            engine.send_raw([b"", b"x"])
            engine.publish(stored([2], [2] * 4, parent=99))
            other.publish(stored([5], [5] * 4))
            await eventually(lambda: read("applied_total", 0) == 3)
            await eventually(lambda: read("applied_total", 1) == 1)
            await eventually(lambda: read("garbage_total", 0) == 1)
            assert read("unreadable_total", 0) == 1
            assert read("dropped_events_total", 0) == 2
            assert read("normalized_total", 0, outcome="stored") == 1
            assert read("normalized_total", 0, outcome="held_back") == 1
            assert read("normalized_total", 0, outcome="removed") is None
            assert read("orphan_blocks", 0) == 1
            assert read("waiting_seconds", 0) < 60.0
            assert read("lost_total", 1) == 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
