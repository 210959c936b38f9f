"""A random series of faults while blocks come and go, by seed."""

import asyncio
from contextlib import asynccontextmanager
from random import Random

from support.processes.proxies import NONE, Faults

FAULTS_AT_ONCE = 2


class Scenario:
    """Faults of an event plane in `duration_s`. `faults`: so far, for a failed run's report."""

    def __init__(self, plane, seed, duration_s=6.0):
        self.faults = []
        self._plane = plane
        self._rng = Random(seed)
        self._duration_s = duration_s

    async def run(self):
        """Set up what is befallen, let it happen, and leave everything whole again."""
        plane, rng = self._plane, self._rng
        for _ in range(rng.randint(1, 2)):
            await plane.router()
        for worker_id in (1, 2):
            await plane.edge(worker_id, dp_size=rng.randint(1, 2))
        if rng.random() < 0.8:
            await plane.until_right()
        changing = plane.spawn(plane.change_for(self._duration_s, rng.choice([0.005, 0.02, 0.1])))
        troubles = [asyncio.create_task(self._trouble(changing)) for _ in range(FAULTS_AT_ONCE)]
        await asyncio.gather(changing, *troubles)

    async def _trouble(self, changing):
        """One fault after another; two of a kind may meet."""
        rng = self._rng
        while not changing.done():
            await asyncio.wait([changing], timeout=rng.uniform(0.0, 0.8))
            cause = rng.choice(
                [
                    self._astray,
                    self._astray,
                    self._stall,
                    self._cut,
                    self._router,
                    self._edge,
                    self._bus,
                ]
            )
            seconds = rng.choice([0.0, 0.3, 1.2, 2.5]) * rng.random()
            async with cause(seconds):
                await asyncio.wait([changing], timeout=seconds)

    def _note(self, what, *details):
        self.faults.append((round(asyncio.get_running_loop().time(), 2), what, *details))

    @asynccontextmanager
    async def _astray(self, seconds):
        name = self._rng.choice(list(self._plane.links))
        faults = self._rng.choice(
            [
                Faults(lost=0.02),
                Faults(doubled=0.1),
                Faults(delayed=0.1, delay_s=0.8),
                Faults(lost=0.2, about=b".load."),
                Faults(lost=0.1, delayed=0.2, about=b".events."),
                Faults(latency_s=0.05),
            ]
        )
        self._note("astray", name, faults, seconds)
        link = self._plane.links[name]
        direction = self._rng.choice(["to_client", "from_client"])
        setattr(link, direction, faults)
        yield
        setattr(link, direction, NONE)

    @asynccontextmanager
    async def _stall(self, seconds):
        name = self._rng.choice(list(self._plane.links))
        self._note("stall", name, seconds)
        self._plane.links[name].stall()
        yield
        self._plane.links[name].resume()

    @asynccontextmanager
    async def _cut(self, seconds):
        name = self._rng.choice(list(self._plane.links))
        self._note("cut", name, seconds)
        await self._plane.links[name].go_down()
        yield
        self._plane.links[name].come_up()

    @asynccontextmanager
    async def _router(self, seconds):
        router = self._rng.choice(self._plane.routers)
        if self._rng.random() < 0.5:
            self._note("router killed", router.name)
            router.process.end()
            router.process.start()
            yield
        else:
            self._note("router paused", router.name, seconds)
            router.process.pause()
            yield
            router.process.go_on()

    @asynccontextmanager
    async def _edge(self, seconds):
        edge = self._rng.choice(list(self._plane.edges.values()))
        if edge.is_dead:
            yield
            return
        self._note("edge killed", edge.worker_id, seconds)
        await self._plane.links[edge.worker_id].go_down()
        await edge.kill()
        edge.clock_error_s = self._rng.choice([0, -7200, 7200])
        yield
        self._plane.links[edge.worker_id].come_up()
        edge.start()

    @asynccontextmanager
    async def _bus(self, seconds):
        server = self._plane.nats_server
        if not server.is_running:
            yield
            return
        is_empty = self._rng.random() < 0.3
        self._note("bus killed", seconds, is_empty)
        server.kill()
        yield
        server.start(empty=is_empty)
