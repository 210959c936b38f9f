"""One rank of an engine that is asked for its events, followed: from answers to its journal.

TrtllmPull ─batches─▶ PullLog ─steps─▶ EngineFeed ─▶ journal ─▶ on_lot
                                         └─ every 2,000 batches, and at the end ─▶ state file

The same to whoever publishes as `follower.py`, which follows engines that stream.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from router.protocol.values import Rank
from router.publisher.engine_address import EngineAddress
from router.publisher.engine_batch import EngineBatch
from router.publisher.engine_feed import EngineFeed
from router.publisher.engine_loads import EngineLoads
from router.publisher.engine_log import UNKNOWN_S
from router.publisher.engine_position import SavedPosition
from router.publisher.engine_steps import ApplyDecoded, EngineLogCounters, Step
from router.publisher.follower import (
    EngineFollower,
    FollowedLot,
    FollowerCondition,
    FollowerStatus,
    OnLot,
)
from router.publisher.kept_state import KeptState
from router.publisher.normalizer import Normalizer
from router.publisher.pull_log import PullLog
from router.publisher.source_journal import SourceJournal
from router.publisher.trtllm_events import TrtllmBatch
from router.publisher.zmq_sockets import Context
from router.publisher.zmq_source import SourceStatus

log = logging.getLogger(__name__)

TICK_S = 0.1


class PullSettings(Struct, frozen=True):
    """Of one rank. `url` is where the engine is asked; without a `state_path` nothing is kept."""

    url: str
    state_path: Path | None = None


class PullFollower:
    """Follower of one rank. Its journal and normaliser are new, and nobody else's."""

    def __init__(
        self,
        rank: Rank,
        journal: SourceJournal,
        normalizer: Normalizer,
        settings: PullSettings,
        on_lot: OnLot,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._journal = journal
        self._address = EngineAddress(settings.url)
        self._on_lot = on_lot
        self._clock = clock
        self._kept = KeptState(rank, settings.state_path)
        now_s = clock()
        saved = self._kept.restored(normalizer, now_s)
        self._log = PullLog(0 if saved is None else saved.cursor)
        self._proven_s = now_s - UNKNOWN_S
        self.feed = EngineFeed(journal, normalizer, rank.dp_rank)
        self.engine_loads = EngineLoads(rank.dp_rank, journal.identity.block_size)
        self.source = SourceStatus()
        self.log_counters = EngineLogCounters()

    @property
    def rank(self) -> Rank:
        """Whom it follows."""
        return self._rank

    def waiting_s(self, now_s: float) -> float:
        """For how long anything may have been missing: since the last answered question."""
        return now_s - self._proven_s

    def status(self, now_s: float) -> FollowerStatus:
        """What an operator wants to know."""
        heard_s = self.source.heard_s
        is_known = heard_s is not None and self.source.problem is None
        condition = FollowerCondition.FOLLOWING if is_known else FollowerCondition.CONNECTING
        silent_s = None if heard_s is None else now_s - heard_s
        problem = self.source.problem or self.feed.problem
        return FollowerStatus(self._address, condition, problem, silent_s)

    def pulled(
        self, batches: Sequence[TrtllmBatch], malformed: Sequence[str], asked_s: float
    ) -> None:
        """An answer to what was asked then: this rank's batches, and what is of no rank."""
        if self.source.heard_s is None or self.source.problem is not None:
            self.source.connections += 1
        self.source.problem = None
        self.source.heard_s = self._clock()
        self.source.messages += 1
        steps = [step for batch in batches for step in self._log.take(batch)]
        if malformed:
            nothing = EngineBatch(None, [], [], list(malformed))
            steps.append(ApplyDecoded(self._log.cursor, nothing))
        self._take(steps, asked_s)

    def failed(self, problem: str) -> None:
        """No answer, or one that could not be read: what it told is missing in the next."""
        self.source.failed_connections += 1
        self.source.problem = problem

    async def run(self, _: Context) -> None:
        """Let time pass until cancelled; then keep the state."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self._take([], self._proven_s)
                if self.feed.is_state_due:
                    await self._keep()
        finally:
            await self._keep()

    def _take(self, steps: Sequence[Step], asked_s: float) -> None:
        now_s, since_s = self._clock(), self._proven_s
        self.feed.take(steps, now_s)
        self.feed.tick(now_s)
        self._proven_s = asked_s
        if steps or self._journal.has_news:
            self._on_lot(FollowedLot(since_s, now_s, len(steps)))
        for sentence in self.feed.take_complaints(now_s):
            log.warning("rank %s: %s", self._rank, sentence)

    async def _keep(self) -> None:
        """A copy: who asks the engine does not wait for the disk."""
        state = SavedPosition(self._log.cursor, b""), [bytes(part) for part in self.feed.save()]
        await asyncio.shield(self._kept.keep(lambda: state))


Follower: TypeAlias = EngineFollower | PullFollower
"""Of an engine that streams its events, or of one that is asked for them."""
