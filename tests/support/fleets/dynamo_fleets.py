"""A Dynamo fleet that is followed, and the core that it feeds, without a bus between them."""

from router.core.commands import Apply, ApplyLoad, ApplySlice
from router.discovery.dynamo.fleet.fleet import DynamoFleet
from router.discovery.dynamo.fleet.messages import (
    ActiveLoad,
    CacheEvent,
    Change,
    EventMessage,
    RouterEvent,
    StoredBlock,
    StoredBlocks,
)
from router.discovery.dynamo.fleet.settings import DynamoSettings
from router.protocol.values import Rank
from support.values.builders import World

SETTINGS = DynamoSettings(
    nats_url="nats://a:1",
    namespace="ns",
    component="backend",
    model_name="m",
    routing_group="g",
    block_size=16,
    max_num_batched_tokens=8192,
    total_kv_blocks=1000,
    max_ranks=2,
    silence_s=60.0,
)


class FollowedFleet:
    """A fleet and its core; `tell` passes the fleet's messages on to the core."""

    def __init__(self):
        self.core = World().core
        self.fleet = DynamoFleet(self.core, SETTINGS, incarnation=1000, multiplier=3)

    def store(self, *hashes, worker_id=7, event_id=1, now_s=0.0, parent=None, publisher_id=1):
        blocks = [StoredBlock(h, h) for h in hashes]
        change = Change(stored=StoredBlocks(blocks, parent))
        event = RouterEvent(worker_id, CacheEvent(event_id, change))
        self.fleet.take_events(EventMessage([event], [], 1, publisher_id), now_s)
        self.tell(now_s)

    def load(self, worker_id=7, may_appear=True, now_s=0.0, **fields):
        self.fleet.take_load(ActiveLoad(worker_id, **fields), now_s, may_appear=may_appear)
        self.tell(now_s)

    def tell(self, now_s=0.0):
        for rank in self.fleet.take_changed():
            for message in self.fleet.take_messages(rank):
                self.core.handle(Apply(message), now_s)
                while self.core.handle(ApplySlice(), 0.0)[0]:
                    pass
            report = self.fleet.take_report(rank, now_s)
            if report is not None:
                assert self.core.handle(ApplyLoad(report), now_s)[1] == []

    def held(self, worker_id=7):
        return self.core.index.held_blocks(Rank(worker_id, 0))

    def trust(self, worker_id=7, now_s=0.0):
        return self.core.trust(Rank(worker_id, 0), now_s)

    def gauges(self):
        return self.core.fleet.get(7).reports[Rank(7, 0)].gauges
