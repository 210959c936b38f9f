"""Agents beside engines: the real log, feed and normaliser of every rank, off a faulty wire."""

import asyncio

from router.publisher.batch_order.batch_order import BatchOrder, BatchOrderSettings
from router.publisher.batch_order.steps import Apply, Replay
from router.publisher.feed.engine_feed import EngineFeed
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.normalizer.settings import EngineSettings
from simulation.agents import IDENTITY, AgentRank
from simulation.hybrid import doubts_of, held_in_classes
from simulation.wire import MAX_DELAY_S, Wire

TICK_S = 0.1
SAVED_BATCHES = 8


class BridgedRank(AgentRank):
    """One rank whose engine is another process."""

    def __init__(self, agent, rank):
        super().__init__(agent, rank)
        world = agent.world
        scenario = world.scenario
        self._process = world.engines[rank]
        self._kept = world.disk
        settings = _settings(scenario, scenario.model_of(rank.worker_id))
        self._normalizer = Normalizer(self.journal, IDENTITY, settings=settings)
        position = self._restore()
        log_settings = BatchOrderSettings(can_replay=scenario.can_replay)
        self._log = BatchOrder(self._clock(), log_settings, position)
        self._feed = EngineFeed(self.journal, self._normalizer, rank.dp_rank)
        self._batches = 0
        self._as_of_s = self._clock()
        self._wire = Wire(self._process, self)
        agent.start_task(self._tick_forever)

    @property
    def doubts(self):
        """Why this rank may honestly not be exact."""
        return doubts_of(self.journal.state.doubts, self.journal.hybrid)

    def present(self):
        """The truth of this moment, be it known here or not."""
        return self._process.cache.held()

    def is_knowable(self):
        """Whether a perfect listener can know the truth: what was lost without a trace, on a
        connection that stood, only a replay can show.
        """
        return self._world.scenario.can_replay or not self._wire.has_lost

    def is_provable(self):
        """Whether an idle engine can be asked if there is more."""
        return self._world.scenario.can_replay

    def has_held(self, held, since_s):
        """Whether the engine has held exactly this at some moment since, or while the wire was slow
        before: that is unknown.
        """
        return self._process.has_held(held, since_s - 2 * MAX_DELAY_S)

    def stop(self):
        super().stop()
        self._wire.close()

    def waiting_s(self):
        return max(super().waiting_s(), self._log.waiting_s(self._clock()))

    def edge_problem(self):
        """What is wrong with the journal, whose agent has no doubts."""
        if self.doubts:
            return None
        held = {(int(t), h) for t in range(2) for h in self.journal.held(t).tolist()}
        held |= held_in_classes(self.journal.hybrid, self.journal.held_in_class)
        if held == self.life.held:
            return None
        ghosts, lost = len(held - self.life.held), len(self.life.held - held)
        return f"{self.rank}: the journal has {ghosts} ghosts, and lacks {lost}"

    # ── What the wire delivers ───────────────────────────────────────────────────────────────────

    def connected(self):
        self._take(self._log.connected(self._clock()))

    def disconnected(self):
        self._take(self._log.disconnected(self._clock()))

    def live(self, sequence, payload):
        now_s = self._clock()
        self._take(self._log.live(sequence, payload, now_s, now_s))

    def replayed(self, sequence, payload):
        self._take(self._log.replayed(sequence, payload, self._clock()))

    def replay_ended(self):
        self._take(self._log.replay_ended(self._clock()))

    def replay_failed(self):
        self._take(self._log.replay_failed("no answer", self._clock()))

    async def _tick_forever(self):
        while True:
            await asyncio.sleep(TICK_S)
            self._feed.tick(self._clock())
            self._take(self._log.tick(self._clock()))

    def _take(self, steps):
        for step in steps:
            if isinstance(step, Replay):
                self._wire.ask(step.first)
                continue
            if not isinstance(step, Apply):
                self._world.server.counts[type(step).__name__] += 1
                self._world.trace(self.rank, step)
            self._feed.take([step], self._clock())
            if isinstance(step, Apply):
                self._note_truth(step)
        if steps:
            if not self.journal.has_news:
                self.life.record(self.journal.last_event_id, self.doubts)
            self.events.noted(self._as_of_s)
            self.loads.changed()
        self._as_of_s = self._clock() - self._log.waiting_s(self._clock())

    def _note_truth(self, step):
        batch = self._process.batch_of[step.payload]
        held = self._process.held_after[batch]
        self.life.change(held, self._clock())
        self._batches += 1
        if self._world.scenario.keeps_state and self._batches % SAVED_BATCHES == 0:
            self._kept[self.rank] = (self._log.save(), b"".join(self._feed.save()), held)

    def _restore(self):
        kept = self._kept.get(self.rank)
        if kept is None:
            return None
        position, normalizer, held = kept
        self._normalizer.load(normalizer, self._clock())
        self.life.change(held, self._clock())
        self._world.server.counts["state_restored"] += 1
        return position


def _settings(scenario, model):
    """What is registered with an engine; one with a hybrid model has no lower tier."""
    if model is not None:
        return EngineSettings(
            num_gpu_blocks=model.pool_blocks, has_lower_tiers=False, hybrid=model.settings
        )
    return EngineSettings(
        num_gpu_blocks=scenario.device_blocks,
        has_lower_tiers=bool(scenario.host_blocks),
        clears_lower_tiers=scenario.clears_lower_tiers,
    )
