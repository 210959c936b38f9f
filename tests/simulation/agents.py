"""Agents in virtual time: the real journal, publisher and reports of every rank, over faulty links.

`OwnRank` is its own engine; `bridges.BridgedRank` stands beside one.
"""

import asyncio
from functools import partial

from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.loads import LoadReport, decode_beacon
from router.protocol.values import SCHEME, Identity
from router.publisher.event_publisher import KvEventPublisher
from router.publisher.load_publisher import LoadPublisher, ReceivedBeacons
from router.runtime.bus.errors import BusError, TwinError
from router.runtime.bus.kv_lease import RENEW_S
from simulation.clients import SimulatedTransport
from simulation.corpus import BLOCK_SIZE
from simulation.engine import BlockRemoved, BlockStored, CacheCleared, SetChanges
from simulation.link import Link
from simulation.truth import RecordedJournal
from worker_agent.process.control import CHECKPOINT_INTERVAL_S

IDENTITY = Identity(SCHEME, BLOCK_SIZE)
LOAD_INTERVAL_S = 0.4
RETRY_S = 1.0


class Agent:
    """One agent of a worker, from its start to its end."""

    def __init__(self, world, worker_id, incarnation):
        self.world = world
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.link = Link(world.server, f"worker {worker_id}", self._connected)
        self.transport = SimulatedTransport(self.link)
        self.beacons = ReceivedBeacons()
        self.is_stopped = False
        self._tasks = []
        self.ranks = [world.new_rank(self, rank) for rank in world.scenario.ranks_of(worker_id)]
        world.trace(self.link.name, "begins, incarnation", incarnation)
        self.start_task(self._live)

    def start_task(self, work):
        """Run this coroutine function for as long as the agent lives."""
        self._tasks.append(asyncio.create_task(self._until_published(work)))

    def stop(self):
        """Die at once, in the middle of whatever was going on."""
        self.is_stopped = True
        self.world.trace(self.link.name, "ends, incarnation", self.incarnation)
        for task in self._tasks:
            task.cancel()
        self.link.close()
        for rank in self.ranks:
            rank.stop()

    async def verify(self):
        """Make sure that the id is still ours. Raises TwinError."""
        owner = await self.link.request(self._owner)
        if owner is not None and owner.incarnation != self.incarnation:
            raise TwinError(f"worker.{self.worker_id}", "taken over")

    async def _until_published(self, work):
        """End an agent that has lost its id, as the real agent does."""
        try:
            await work()
        except TwinError:
            self.world.server.counts["twin_fenced"] += 1
            self.stop()
            self.world.replace_fenced(self)
        except Exception as error:  # noqa: BLE001 -- it would end the agent, unseen
            self.world.checker.failures.append(f"{self.link.name} dies of {error!r}")

    async def _live(self):
        await self._announce(self._claim)
        subjects, server = self.world.subjects, self.world.server
        server.listen(self.link, subjects.beacons, self._hear_beacon)
        self.start_task(self._renew_forever)
        for rank in self.ranks:
            rank.start()
            wanted = subjects.checkpoint_wanted(rank.rank)
            server.listen(self.link, wanted, rank.take_request)

    async def _announce(self, write):
        while True:
            try:
                await write()
            except BusError:
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _claim(self):
        """Take the id, unless a live agent has it. Raises TwinError."""
        seen = await self.link.request(self._owner)
        if await self.link.request(lambda: self.world.answers_ping(self)):
            raise TwinError(f"worker.{self.worker_id}", "another agent responds")
        await self.link.request(lambda: self._write_over(seen))

    async def _renew(self):
        await self.verify()
        await self.link.request(self._write)

    async def _renew_forever(self):
        while True:
            await asyncio.sleep(RENEW_S)
            await self._announce(self._renew)

    def _owner(self):
        return self.world.server.bucket.get(self.worker_id)

    def _write_over(self, seen):
        owner = self._owner()
        if owner not in (None, seen) and owner.incarnation != self.incarnation:
            raise TwinError(f"worker.{self.worker_id}", "claimed at the same moment")
        self._write()

    def _write(self):
        self.world.server.announce(
            self.worker_id,
            WorkerAnnouncement(
                worker_id=self.worker_id,
                name=f"w{self.worker_id}",
                endpoint="http://w",
                identity=IDENTITY,
                total_kv_blocks=1000,
                max_num_batched_tokens=8192,
                data_parallel_size=len(self.ranks),
                agent_is_engine=not self.world.scenario.is_bridged,
                incarnation=self.incarnation,
            ),
        )

    def _connected(self, is_connected):
        if is_connected:
            self.start_task(partial(self._announce, self._renew))

    def _hear_beacon(self, subject, payload):
        self.beacons.record(decode_beacon(payload), self.world.loop.time())


class AgentRank:
    """One rank of an agent: its journal, and everything that publishes it."""

    def __init__(self, agent, rank):
        world = agent.world
        self.rank = rank
        self._agent = agent
        self._world = world
        self._clock = world.loop.time
        self.journal = RecordedJournal(
            world.truth, self._clock, rank, agent.incarnation, IDENTITY, world.scenario.journal
        )
        self.events = KvEventPublisher(
            self.journal,
            world.subjects.events(rank),
            flush_interval_s=world.scenario.flush_interval_s,
            clock=self._clock,
        )
        self.loads = LoadPublisher(
            self._report, world.subjects.load(rank), interval_s=LOAD_INTERVAL_S
        )
        self._report_count = 0
        self._answered_s = float("-inf")

    @property
    def life(self):
        """What is true of the life that the journal describes."""
        return self.journal.life

    def start(self):
        run_events = partial(self.events.run, self._agent.transport, self._agent.verify)
        self._agent.start_task(run_events)
        self._agent.start_task(partial(self.loads.run, self._agent.transport))

    def stop(self):
        self.life.ended_s = self._clock()

    def take_request(self, subject, payload):
        """A router wants a checkpoint."""
        if self._clock() - self._answered_s >= CHECKPOINT_INTERVAL_S:
            self._answered_s = self._clock()
            self.events.require_checkpoint()

    def waiting_s(self):
        """For how long something has been known here that the log does not have."""
        return self.events.waiting_s

    def _report(self):
        self._report_count += 1
        published = self.events.published
        return LoadReport(
            worker_id=self.rank.worker_id,
            dp_rank=self.rank.dp_rank,
            agent_incarnation=self._agent.incarnation,
            incarnation=self.events.incarnation,
            report_id=self._report_count,
            event_id=published.event_id,
            state=self.events.reported_state,
            waiting_s=self.waiting_s(),
            heard=self._agent.beacons.last(self._clock()),
        )


class OwnRank(AgentRank):
    """One rank of an agent that is its own engine: what the cache does goes into the journal."""

    doubts = 0

    def __init__(self, agent, rank):
        super().__init__(agent, rank)
        self._cache = agent.world.new_engine(rank.worker_id)
        self._sets = SetChanges()
        agent.start_task(self._compute)

    def present(self):
        """The truth of this moment."""
        return self._cache.held()

    def is_knowable(self):
        """Whether a perfect listener can know the truth."""
        return True

    def is_provable(self):
        """Whether an idle engine can be asked if there is more."""
        return True

    def has_held(self, held, since_s):
        """Whether the engine has held exactly this since; it is in here, and the truth knows."""
        return True

    def edge_problem(self):
        """What is wrong with the journal itself; None."""

    async def _compute(self):
        while True:
            await asyncio.sleep(self._world.think_s())
            if not self._world.is_quiet:
                self._apply(self._cache.step())

    def _apply(self, changes):
        """The cache changed: note the truth, and say what a set-keeper says of it."""
        self.life.change(self._cache.held(), self._clock())
        for change in changes:
            self._tell(change, self._sets.of(change))
        self.loads.changed()

    def _tell(self, change, nodes):
        match change:
            case CacheCleared(tier):
                self.events.cleared(tier)
            case BlockStored(tier):
                for run in _runs(nodes):
                    parent = None if run[0].parent is None else run[0].parent.sequence_hash
                    self.events.stored(tier, [node.sequence_hash for node in run], parent)
            case BlockRemoved(tier) if nodes:
                self.events.removed(tier, [node.sequence_hash for node in nodes])


def _runs(nodes):
    """Nodes in runs, each of consecutive blocks of one prompt."""
    runs = []
    for node in nodes:
        if runs and runs[-1][-1] is node.parent:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs
