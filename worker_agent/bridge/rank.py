"""One rank of an engine next to the agent: followed from the engine, published on the bus."""

import asyncio
import time
from pathlib import Path
from secrets import randbits

from msgspec.structs import asdict

from router.protocol.hybrid import NO_SETTINGS
from router.protocol.subjects import Subjects
from router.protocol.values import Identity, Rank
from router.publisher.bridge import BridgeSettings, EngineBridge
from router.publisher.engine_metrics.dialects import EngineLimits
from router.publisher.engine_metrics.metrics import EngineMetrics
from router.publisher.engine_metrics.rate_windows import RateEstimator
from router.publisher.event_publisher import MIN_FLUSH_S, KvEventPublisher
from router.publisher.feed.pacing import Pacing
from router.publisher.follower.follower import FollowerCondition, FollowerSettings
from router.publisher.follower.loop_slices import SliceScheduler
from router.publisher.follower.pull_follower import Follower, PullSettings
from router.publisher.follower.tier_follower import TierFollower
from router.publisher.journal.consolidator import JournalConsolidator, SourceJournal
from router.publisher.journal.journal import EventJournal
from router.publisher.load_publisher import LoadPublisher, ReceivedBeacons
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.normalizer.settings import EngineSettings
from router.publisher.rank_queries import LocalIndex, RankQueryResponder
from router.publisher.zmq.sockets import Context
from worker_agent.bridge.engine_facts import ReconciledFacts
from worker_agent.config.bridge import BridgeConfig, EngineConfig, RankAddresses


class BridgedRank:
    """One rank, in one life of the worker; its load comes from a socket or from metrics."""

    def __init__(
        self,
        config: BridgeConfig,
        addresses: RankAddresses,
        facts: ReconciledFacts,
        incarnation: int,
        beacons: ReceivedBeacons,
        pacing: Pacing,
        turns: SliceScheduler,
    ) -> None:
        self._addresses = addresses
        self._estimator = RateEstimator()
        self._facts = EngineLimits(**asdict(facts))
        naming = config.naming
        identity = Identity(naming.scheme, facts.block_size, config.engine.eagle)
        multiplier = randbits(64) | 1
        journal = EventJournal(
            self.rank, incarnation, identity, multiplier=multiplier, naming=naming
        )
        engine_journal: SourceJournal = journal
        self.tiers: TierFollower | None = None
        if addresses.tiers is not None:
            sources = JournalConsolidator(journal, multiplier)
            engine_journal = sources.source()
            self.tiers = TierFollower(
                addresses.tiers, sources.source(), self.rank.dp_rank, self._note_tiers
            )
        settings = EngineSettings(
            report_mode=config.engine.report_mode,
            num_gpu_blocks=facts.total_kv_blocks,
            clears_lower_tiers=config.kind == "sglang",
            hybrid=config.engine.hybrid,
            has_full_only=config.kind != "vllm" and config.engine.hybrid != NO_SETTINGS,
        )
        self._bridge = EngineBridge(
            self.rank,
            journal,
            Normalizer(engine_journal, identity, settings=settings),
            Subjects(config.worker.namespace),
            BridgeSettings(
                self._follower_settings(config.engine),
                config.bus.event_flush_s or MIN_FLUSH_S,
                config.agent.load_interval_s,
            ),
            beacons,
            pacing,
            turns,
            also_waiting_s=self._tiers_waiting_s,
        )
        self._journal = journal
        self.answers = RankQueryResponder(self.rank, LocalIndex(journal), self._bridge.report)

    @property
    def rank(self) -> Rank:
        """The rank."""
        return self._addresses.rank

    @property
    def follower(self) -> Follower:
        """The follower of the engine."""
        return self._bridge.follower

    @property
    def events(self) -> KvEventPublisher:
        """The publisher of its blocks."""
        return self._bridge.events

    @property
    def loads(self) -> LoadPublisher:
        """The publisher of its load."""
        return self._bridge.loads

    @property
    def is_connected(self) -> bool:
        """True if its event socket is connected."""
        status = self.follower.status(time.monotonic())
        return status.condition is not FollowerCondition.CONNECTING

    async def run(self, context: Context) -> None:
        """Follow the engine, and its tiers, until cancelled; then save the state."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follower.run(context))
            if self.tiers is not None:
                group.create_task(self.tiers.run())

    def take(self, metrics: EngineMetrics, dated_s: float, took_s: float) -> None:
        """Record the load in an engine's metrics, unless the rank has a load socket.

        `dated_s`: the middle of the reading, which took `took_s`.
        """
        if self._addresses.load is None:
            load = metrics.load(self.rank.dp_rank, self._facts)
            if load is not None:
                timed = self._estimator.take(load, dated_s, took_s, metrics.started_s)
                self.follower.engine_loads.note(timed, time.monotonic())

    def problem(self) -> str | None:
        """Return the current problem of the rank as a sentence, or None."""
        status = self.follower.status(time.monotonic())
        present = status.problem
        if present is None and status.condition is FollowerCondition.CONNECTING:
            present = f"no connection to its events at {status.address.events} yet"
        elif present is None and status.condition is FollowerCondition.BLIND:
            present = "lost events cannot be recovered: no replay is available"
        if present is None:
            problem = None if self.tiers is None else self.tiers.problem
            return problem and f"rank {self.rank.dp_rank}: {problem}"
        last_event = "" if status.silent_s is None else f"; last event {status.silent_s:.0f} s ago"
        return f"rank {self.rank.dp_rank}: {present}{last_event}"

    def _note_tiers(self, since_s: float) -> None:
        if self._journal.has_news:
            self._bridge.events.noted(since_s)

    def _tiers_waiting_s(self, now_s: float) -> float:
        return 0.0 if self.tiers is None else self.tiers.waiting_s(now_s)

    def _follower_settings(self, config: EngineConfig) -> FollowerSettings | PullSettings:
        state_path = self._state_path(config)
        if config.events_url is not None:
            return PullSettings(config.events_url, state_path)
        return FollowerSettings(self._addresses.engine, self._addresses.load, state_path)

    def _state_path(self, config: EngineConfig) -> Path | None:
        if config.state_dir is None:
            return None
        return Path(config.state_dir) / f"{self.rank}.state"
