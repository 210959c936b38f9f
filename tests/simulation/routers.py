"""Routers in virtual time: the real core, fed by the real subscriber, over a faulty link."""

import asyncio
from random import Random

from router.core.commands import MarkBeacon, SetConnected, Tick, Tidy, UpsertWorker
from router.core.core import RouterCore
from router.core.effects import FetchWorker, RequestCheckpoint, SendBeacon
from router.indexer.radix_tree.radix_tree import RadixTree
from router.ingest.engine_polls import PollDuties
from router.ingest.subscriber import Subscriber
from router.observability.health import ServiceStatus
from router.protocol.loads import encode_beacon
from router.publisher.follower.loop_slices import SliceScheduler
from router.runtime.bus.errors import BusError
from router.service.host import TICK_S, TIDY_SLICES
from simulation.clients import SimulatedStream
from simulation.link import Link
from support.values.builders import settings


class Router:
    """One router, from its start to its end."""

    def __init__(self, world, router_id):
        self.world = world
        self.router_id = router_id
        self._clock = world.loop.time
        seed = world.random.getrandbits(64)
        self._indexes = []
        self.core = RouterCore(settings(router_id=router_id), self._small_index, Random(seed))
        self.link = Link(world.server, f"router {router_id}", self._connected, self._announced)
        self.core.handle(SetConnected(True), self._clock())
        self.subscriber = Subscriber(
            self.core,
            self,
            ServiceStatus("nats://simulated", needs_workers=True),
            world.shared.metrics,
            world.subjects,
            SliceScheduler(self._clock),
            PollDuties(None),
            self._clock,
        )
        world.server.listen(self.link, world.subjects.all_loads, self.subscriber.take_load)
        self._tasks = [
            asyncio.create_task(self.subscriber.run_events(SimulatedStream(self.link))),
            asyncio.create_task(self._tick_forever()),
        ]
        self._errands = []

    def stop(self):
        """Die at once."""
        for task in (*self._tasks, *self._errands):
            task.cancel()
        self.link.close()

    def check_alive(self):
        """Whatever ends a task of a router would end the router."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def dumped_classes(self):
        """Yield the blocks of hybrid ranks' classes, each with its class."""
        for index in self._indexes:
            if index.classes is not None:
                for blocks in index.classes.tree.dump():
                    layout = index.classes.layouts[blocks.rank]
                    yield layout.classes[blocks.tier], blocks

    def perform(self, effects):
        """What the outbox does."""
        for effect in effects:
            match effect:
                case RequestCheckpoint(rank, reason):
                    self.world.trace(
                        f"router {self.router_id} asks {rank} for a checkpoint:", reason
                    )
                    self.world.server.counts["checkpoint_asked"] += 1
                    self._say(self.world.subjects.checkpoint_wanted(rank), b"")
                case SendBeacon(beacon):
                    self._say(self.world.subjects.beacons, encode_beacon(beacon))
                case FetchWorker(worker_id):
                    self._errands = [each for each in self._errands if not each.done()]
                    self._errands.append(asyncio.create_task(self._fetch(worker_id)))

    def _say(self, subject, payload):
        if self.link.is_open:
            self.world.server.tell(self.link, subject, payload)

    async def _tick_forever(self):
        pause_s = TICK_S * (1.0 + self.world.random.random())
        while True:
            await asyncio.sleep(pause_s)
            pause_s = TICK_S
            now_s = self._clock()
            self.perform(
                [*self.core.handle(Tick(), now_s)[1], *self.core.handle(MarkBeacon(), now_s)[1]]
            )
            for _ in range(TIDY_SLICES):
                if not self.core.handle(Tidy(), self._clock())[0]:
                    break
                await asyncio.sleep(0)

    async def _fetch(self, worker_id):
        try:
            found = await self.link.request(lambda: self.world.server.bucket.get(worker_id))
        except BusError:
            return
        if found is not None:
            self._announced(worker_id, found)

    def _announced(self, worker_id, announcement):
        self.core.handle(UpsertWorker(announcement), self._clock())

    def _connected(self, is_connected):
        self.core.handle(SetConnected(is_connected), self._clock())

    def _small_index(self):
        """As the real one, but with few sub-tables, quick to make, and often checked."""
        self._indexes.append(RadixTree(1 << 14, check_interval=3, sub_bits=4))
        return self._indexes[-1]
