"""One run: workers, routers and a bus in virtual time, faults that strike, and what must hold.

engine ─▶ agent ─▶ Link ─▶ Server ─▶ Link ─▶ router         every answer marked exact:
  │                                            │              the engine's set at its cursor,
  └──────────── Truth ◀──── compared ──────────┘              and that not older than a second
                                                            at the end: exact, no ghost, no loss
"""

import asyncio
from collections import Counter
from random import Random

from msgspec import Struct, field

from router.observability.metrics import RouterMetrics
from router.protocol.subjects import Subjects
from simulation.agents import Agent, OwnRank
from simulation.bridges import BridgedRank
from simulation.bus import Server
from simulation.checks import Checker
from simulation.corpus import Corpus
from simulation.engine import EngineModel
from simulation.faults import Faults
from simulation.hybrid import HybridCache
from simulation.routers import Router
from simulation.truth import Truth
from simulation.wire import EngineProcess

SETTLE_S = 15.0
CALM_S = 0.6
POLL_S = 0.15
FIRST_INCARNATION = 1 << 40


class Shared:
    """What runs have in common, since it is costly to make and keeps nothing of them."""

    def __init__(self):
        self.corpus = Corpus()
        self.metrics = RouterMetrics()


class Result(Struct, frozen=True):
    """How a run ended. `counts`: faults that really happened, answers that were checked."""

    seed: int
    failures: list[str]
    counts: dict[str, int] = field(default_factory=Counter)
    settled_s: float = 0.0
    simulated_s: float = 0.0


class World:
    """All processes of a run, and the state that they share."""

    def __init__(self, loop, scenario, shared, tell=None):
        self.loop = loop
        self.scenario = scenario
        self.shared = shared
        self.random = Random(f"world {scenario.seed}")
        self.engine_random = Random(f"engine {scenario.seed}")
        self._tell = tell
        self.subjects = Subjects("simulated")
        self.server = Server(loop, Random(f"bus {scenario.seed}"), self.trace)
        self.truth = Truth()
        self.is_quiet = False
        self.agents = {}
        self._all_agents = []
        self.gone = set()
        self.routers = {}
        self.checker = Checker(self)
        self.faults = Faults(self)
        self.engines = {}
        self.disk = {}
        self._incarnation = FIRST_INCARNATION

    def trace(self, *words):
        """Report what happens, if there is a listener."""
        if self._tell is not None:
            self._tell(" ".join([f"{self.loop.time():9.4f} ", *map(str, words)]))

    def new_engine(self, worker_id, life=0):
        """The cache of an engine; in every `life` with names of its own."""
        scenario = self.scenario
        model = scenario.model_of(worker_id)
        if model is not None:
            return HybridCache(self.engine_random, self.shared.corpus, model, life)
        return EngineModel(
            self.engine_random,
            self.shared.corpus,
            scenario.device_blocks,
            scenario.host_blocks,
            scenario.clears(),
        )

    def think_s(self):
        """Time between two steps of an engine: the larger the fleet, the longer."""
        scenario = self.scenario
        return self.engine_random.expovariate(
            1 / (scenario.think_s * scenario.ranks * scenario.workers)
        )

    def start_agent(self, worker_id, *, clock_step=1000):
        """Begin a life; incarnations are times, and clocks jump."""
        self._incarnation += clock_step
        self.agents[worker_id] = Agent(self, worker_id, self._incarnation)
        self._all_agents.append(self.agents[worker_id])

    def answers_ping(self, agent):
        """Does another agent with this one's id answer?"""
        return any(
            other.worker_id == agent.worker_id and other.link.is_open
            for other in self._all_agents
            if other is not agent
        )

    def replace_fenced(self, agent):
        """Of two with one id, one has ended: the other is the worker, or a new one will be."""
        worker_id = agent.worker_id
        for other in self._all_agents:
            if other.worker_id == worker_id and not other.is_stopped:
                self.agents[worker_id] = other
                return
        self.loop.call_later(0.5, self.begin_again, worker_id)

    def lose(self, worker_id):
        """End a worker for good, twins and all."""
        self.gone.add(worker_id)
        for agent in self._all_agents:
            if agent.worker_id == worker_id and not agent.is_stopped:
                agent.stop()

    def begin_again(self, worker_id, clock_step=1000):
        """Start an agent where there is none."""
        if self.agents[worker_id].is_stopped and worker_id not in self.gone:
            self.start_agent(worker_id, clock_step=clock_step)

    def ranks(self):
        """Ranks of the workers that are not gone for good."""
        return [r for r in self.scenario.all_ranks() if r.worker_id not in self.gone]

    def present_rank(self, rank):
        """The agent that publishes this rank now."""
        return self.agents[rank.worker_id].ranks[rank.dp_rank]

    def new_rank(self, agent, rank):
        """A rank of an agent, with its engine inside or beside it."""
        return BridgedRank(agent, rank) if self.scenario.is_bridged else OwnRank(agent, rank)

    def start_router(self, router_id):
        """Start a router, unless it runs."""
        if router_id not in self.routers:
            self.routers[router_id] = Router(self, router_id)

    async def play(self):
        """The whole run; its result."""
        engine_tasks = [self._start_engine(rank) for rank in self._bridged_ranks()]
        for router_id in range(1, self.scenario.routers + 1):
            self.start_router(router_id)
        for worker_id in range(1, self.scenario.workers + 1):
            self.start_agent(worker_id)
        self.faults.schedule()
        while self.loop.time() < self.scenario.active_s:
            await asyncio.sleep(self.random.expovariate(1 / 0.15))
            self.checker.check_answers()
        self.faults.heal()
        self.is_quiet = True
        settled_s = await self._settle()
        await asyncio.gather(*engine_tasks)
        self.server.counts["exact_answers"] = self.checker.exact_answers
        self.server.counts["answers"] = self.checker.answers
        failures = [*self.checker.failures, *self.truth.problems()]
        now_s = self.loop.time()
        return Result(self.scenario.seed, failures, self.server.counts, settled_s, now_s)

    def _bridged_ranks(self):
        return self.scenario.all_ranks() if self.scenario.is_bridged else ()

    def _start_engine(self, rank):
        self.engines[rank] = EngineProcess(self, rank)
        return asyncio.create_task(self._run_engine(self.engines[rank]))

    async def _run_engine(self, engine):
        while not self.is_quiet:
            await asyncio.sleep(self.think_s())
            if not self.is_quiet:
                engine.step()

    async def _settle(self):
        """Wait until every index is right, says so, and stays so; how long it took.

        Late arrivals may upset it once more, but not for ever.
        """
        start_s = calm_since_s = self.loop.time()
        while self.loop.time() - calm_since_s < CALM_S:
            await asyncio.sleep(POLL_S)
            self.checker.check_answers()
            differences = self.checker.differences()
            if differences:
                calm_since_s = self.loop.time()
            if differences and calm_since_s - start_s > SETTLE_S:
                self.checker.failures += differences
                break
        return calm_since_s - start_s
