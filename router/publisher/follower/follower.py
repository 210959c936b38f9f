"""The follower of one rank of an engine that runs elsewhere: from its sockets to its journal.

ZmqSource ─lots of steps, sliced─▶ EngineFeed ─▶ journal ─▶ on_lot: the journal's owner takes events
                             └─ every 2,000 batches, and at the end ─▶ state file
listen_to_loads ─▶ EngineLoads

It knows no bus: `bridge.py` publishes the journal's messages; a router may take them directly.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from router.errors import WireError
from router.protocol.values import Rank
from router.publisher.batch_order.address import EngineAddress
from router.publisher.batch_order.batch_order import BatchOrder, BatchOrderSettings
from router.publisher.batch_order.position import SavedPosition
from router.publisher.batch_order.steps import Apply, ApplyDecoded, BatchOrderCounters, Step
from router.publisher.engine_events.decoder import decode_engine_batch
from router.publisher.engine_metrics.loads import EngineLoads
from router.publisher.feed.engine_feed import EngineFeed
from router.publisher.feed.pacing import Pacing
from router.publisher.follower.loop_slices import SliceScheduler
from router.publisher.follower.state import StateFile
from router.publisher.journal.consolidator import SourceJournal
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.normalizer.state import SavedParts
from router.publisher.zmq.sockets import Context, listen_to_loads
from router.publisher.zmq.source import SourceStatus, ZmqSource

log = logging.getLogger(__name__)

DECODED_BYTES = 1 << 18
"""Larger batches are decoded in a thread, which takes about 0.3 ms, to keep the loop responsive."""


class FollowerSettings(Struct, frozen=True):
    """The settings of one rank.

    `state_path`: None saves no state; `load_endpoint`: SGLang's load socket.
    """

    address: EngineAddress
    load_endpoint: str | None = None
    state_path: Path | None = None
    max_fingerprints: int = 10_000


class FollowedLot(Struct, frozen=True):
    """The steps that were just applied: a lot from the sockets, or a slice of it.

    `since_s`: the time after which they may have happened; `steps`: their number, 0 if only time
    has passed.
    """

    since_s: float
    now_s: float
    steps: int


OnLot: TypeAlias = Callable[[FollowedLot], None]


class FollowerCondition(StrEnum):
    """The state of following an engine; each but the last leads to FOLLOWING by itself."""

    CONNECTING = "connecting"
    REPLAYING = "replaying"
    FOLLOWING = "following"
    BLIND = "blind"
    """Connected, but no replay is available: lost batches stay lost."""


class FollowerStatus(Struct, frozen=True):
    """The state of one rank, for operators.

    `problem`: of its sockets, or else of the last bad batch of its life; `silent_s`: the time since
    its last message.
    """

    address: EngineAddress
    condition: FollowerCondition
    problem: str | None
    silent_s: float | None


class EngineFollower:
    """A follower of one rank. Its journal and normaliser must be new and unshared.

    `on_lot` is called at once after steps were applied or when the journal has messages, before
    anything else is read; it must not wait. `pacing` and `turns` are shared by all followers of the
    process.
    """

    def __init__(
        self,
        rank: Rank,
        journal: SourceJournal,
        normalizer: Normalizer,
        settings: FollowerSettings,
        on_lot: OnLot,
        pacing: Pacing,
        turns: SliceScheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._journal = journal
        self._settings = settings
        self._on_lot = on_lot
        self._pacing = pacing
        self._turns = turns
        self._clock = clock
        self._kept = StateFile(rank, settings.state_path)
        now_s = clock()
        self._log = BatchOrder(
            now_s,
            BatchOrderSettings(
                can_replay=settings.address.replay is not None,
                fingerprints=settings.max_fingerprints,
            ),
            self._kept.restored(normalizer, now_s),
        )
        self._as_of_s = now_s - self._log.waiting_s(now_s)
        self._is_behind = False
        self.feed = EngineFeed(journal, normalizer, rank.dp_rank)
        self.engine_loads = EngineLoads(rank.dp_rank, journal.identity.block_size)
        self.source = SourceStatus()

    @property
    def rank(self) -> Rank:
        """The rank of the engine."""
        return self._rank

    @property
    def log_counters(self) -> BatchOrderCounters:
        """The counters of batches and replays."""
        return self._log.counters

    @property
    def fresh_at_s(self) -> float:
        """The time up to which the journal is complete, as of the last lot."""
        return self._as_of_s

    @property
    def receives_others(self) -> bool:
        """True if messages arrived that are no events, or events of another rank."""
        return bool(self.source.garbage or self.feed.counters.foreign)

    def waiting_s(self, now_s: float) -> float:
        """Return for how long events that the engine published may have been missing."""
        return now_s - self._as_of_s if self._is_behind else self._log.waiting_s(now_s)

    def status(self, now_s: float) -> FollowerStatus:
        """Return the state of the rank for operators. O(1)."""
        last_seen_s = self.source.last_seen_s
        silent_s = None if last_seen_s is None else now_s - last_seen_s
        return FollowerStatus(
            self._settings.address, self._condition(), self._present_problem(), silent_s
        )

    async def run(self, context: Context) -> None:
        """Follow the engine until cancelled, through all its lives; then save the state."""
        load_endpoint = self._settings.load_endpoint
        self._pacing.engines += 1
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow(context))
                if load_endpoint is not None:
                    loads = self.engine_loads
                    group.create_task(listen_to_loads(context, load_endpoint, loads, self._clock))
        finally:
            self._pacing.engines -= 1
            await self._kept.keep(self._state)

    async def _follow(self, context: Context) -> None:
        address, pacing = self._settings.address, self._pacing
        source = ZmqSource(context, address, self._log, self.source, pacing, self._clock)
        async with aclosing(source.read()) as lots:
            async for steps in lots:
                if not steps:
                    self._report(0)
                    self._warn(self._clock())
                    continue
                self._is_behind = True
                slices = self._take(steps)
                try:
                    await _decode_large(steps)
                    await self._turns.carry_out(slices)
                finally:  # The log counts these steps as applied.
                    for _ in slices:
                        pass
                if self.feed.is_state_due and self._settings.state_path is not None:
                    await asyncio.shield(self._kept.keep(self._state))

    def _take(self, steps: Sequence[Step]) -> Iterator[None]:
        """Apply a lot slice by slice; the journal is behind the log until the last one is done."""
        left = len(steps)
        for ended in self.feed.slices(steps, self._clock):
            left -= ended
            self._is_behind = left > 0
            self._report(ended)
            yield
        self._warn(self._clock())

    def _report(self, steps: int) -> None:
        """Report the steps just applied to the journal's owner."""
        now_s = self._clock()
        self.feed.tick(now_s)
        since_s, self._as_of_s = self._as_of_s, now_s - self.waiting_s(now_s)
        if steps or self._journal.has_news:
            self._on_lot(FollowedLot(since_s, now_s, steps))

    def _warn(self, now_s: float) -> None:
        for sentence in self.feed.take_complaints(now_s):
            log.warning("rank %s: %s", self._rank, sentence)
        for sentence in self.source.complaints.take(now_s):
            log.warning("rank %s: %s", self._rank, sentence)

    def _present_problem(self) -> str | None:
        topic = self._settings.address.topic
        if problem := self.source.problem or self._log.problem:
            return problem
        if self._log.is_blind and topic and not self.source.messages:
            return f"no batch received: it was not used, or publishes another topic than {topic!r}"
        return self.feed.problem

    def _condition(self) -> FollowerCondition:
        if not self._log.is_connected:
            return FollowerCondition.CONNECTING
        if self._log.is_blind:
            return FollowerCondition.BLIND
        if self._log.is_following:
            return FollowerCondition.FOLLOWING
        return FollowerCondition.REPLAYING

    def _state(self) -> tuple[SavedPosition, SavedParts]:
        return self._log.save(), self.feed.save()


async def _decode_large(steps: list[Step]) -> None:
    """Decode large batches in a thread; unreadable ones are left as they are."""
    for place, step in enumerate(steps):
        if isinstance(step, Apply) and len(step.payload) > DECODED_BYTES:
            with suppress(WireError):
                batch = await asyncio.to_thread(decode_engine_batch, step.payload)
                steps[place] = ApplyDecoded(step.sequence, batch)
