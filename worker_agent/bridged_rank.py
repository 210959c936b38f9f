"""One rank of an engine beside the agent: followed on one side, published on the other."""

import asyncio
import time
from pathlib import Path
from secrets import randbits

from msgspec.structs import asdict

from router.protocol.subjects import Subjects
from router.protocol.values import Identity, Rank
from router.publisher.answers import RankAnswers
from router.publisher.beacons import HeardBeacons
from router.publisher.bridge import BridgeSettings, EngineBridge
from router.publisher.consolidated import ConsolidatedJournal
from router.publisher.engine_metrics import EngineMetrics
from router.publisher.events import MIN_FLUSH_S, KvEventPublisher
from router.publisher.follower import FollowerCondition, FollowerSettings
from router.publisher.journal import EventJournal
from router.publisher.loads import LoadPublisher
from router.publisher.local_index import LocalIndex
from router.publisher.metrics_dialects import EngineFacts
from router.publisher.normalizer import Normalizer
from router.publisher.normalizer_settings import EngineSettings
from router.publisher.pacing import Pacing
from router.publisher.pull_follower import Follower, PullSettings
from router.publisher.source_journal import SourceJournal
from router.publisher.tier_follower import TierFollower
from router.publisher.turns import Turns
from router.publisher.zmq_sockets import Context
from worker_agent.bridge_config import BridgeConfig, RankAddresses
from worker_agent.engine_facts import SettledFacts


class BridgedRank:
    """One rank, in one life of the agent. Its load comes from its own socket or from metrics."""

    def __init__(
        self,
        config: BridgeConfig,
        addresses: RankAddresses,
        facts: SettledFacts,
        incarnation: int,
        beacons: HeardBeacons,
        pacing: Pacing,
        turns: Turns,
    ) -> None:
        self._addresses = addresses
        self._facts = EngineFacts(**asdict(facts))
        naming = config.naming
        identity = Identity(naming.scheme, facts.block_size, config.eagle)
        multiplier = randbits(64) | 1
        journal = EventJournal(
            self.rank, incarnation, identity, multiplier=multiplier, naming=naming
        )
        engine_journal: SourceJournal = journal
        self.tiers: TierFollower | None = None
        if addresses.tiers is not None:
            sources = ConsolidatedJournal(journal, multiplier)
            engine_journal = sources.source()
            self.tiers = TierFollower(
                addresses.tiers, sources.source(), self.rank.dp_rank, self._note_tiers
            )
        settings = EngineSettings(
            report_mode=config.report_mode,
            num_gpu_blocks=facts.total_kv_blocks,
            clears_lower_tiers=config.engine == "sglang",
        )
        self._bridge = EngineBridge(
            self.rank,
            journal,
            Normalizer(engine_journal, identity, settings=settings),
            Subjects(config.namespace),
            BridgeSettings(
                self._follower_settings(config),
                config.event_flush_s or MIN_FLUSH_S,
                config.load_interval_s,
            ),
            beacons,
            pacing,
            turns,
            also_waiting_s=self._tiers_waiting_s,
        )
        self._journal = journal
        self.answers = RankAnswers(self.rank, LocalIndex(journal), self._bridge.report)

    @property
    def rank(self) -> Rank:
        """Which one."""
        return self._addresses.rank

    @property
    def follower(self) -> Follower:
        """What follows the engine."""
        return self._bridge.follower

    @property
    def events(self) -> KvEventPublisher:
        """What it holds."""
        return self._bridge.events

    @property
    def loads(self) -> LoadPublisher:
        """How busy it is."""
        return self._bridge.loads

    @property
    def is_connected(self) -> bool:
        """Is there a connection to its events?"""
        status = self.follower.status(time.monotonic())
        return status.condition is not FollowerCondition.CONNECTING

    async def run(self, context: Context) -> None:
        """Follow the engine, and the tiers inside it, until cancelled; then keep the state."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follower.run(context))
            if self.tiers is not None:
                group.create_task(self.tiers.run())

    def take(self, metrics: EngineMetrics) -> None:
        """Note the load that an engine's metrics tell, where the rank has no socket that does."""
        if self._addresses.load is None:
            load = metrics.load(self.rank.dp_rank, self._facts)
            if load is not None:
                self.follower.engine_loads.note(load, time.monotonic())

    def problem(self) -> str | None:
        """What is wrong with it now, in words."""
        status = self.follower.status(time.monotonic())
        present = status.problem
        if present is None and status.condition is FollowerCondition.CONNECTING:
            present = f"no connection to its events at {status.address.events} yet"
        elif present is None and status.condition is FollowerCondition.BLIND:
            present = "what is lost stays lost: no replay can be had"
        if present is None:
            problem = None if self.tiers is None else self.tiers.problem
            return problem and f"rank {self.rank.dp_rank}: {problem}"
        heard = "" if status.silent_s is None else f"; last heard {status.silent_s:.0f} s ago"
        return f"rank {self.rank.dp_rank}: {present}{heard}"

    def _note_tiers(self, since_s: float) -> None:
        if self._journal.has_news:
            self._bridge.events.noted(since_s)

    def _tiers_waiting_s(self, now_s: float) -> float:
        return 0.0 if self.tiers is None else self.tiers.waiting_s(now_s)

    def _follower_settings(self, config: BridgeConfig) -> FollowerSettings | PullSettings:
        state_path = self._state_path(config)
        if config.events_url is not None:
            return PullSettings(config.events_url, state_path)
        return FollowerSettings(self._addresses.engine, self._addresses.load, state_path)

    def _state_path(self, config: BridgeConfig) -> Path | None:
        if config.state_dir is None:
            return None
        return Path(config.state_dir) / f"{self.rank}.state"
