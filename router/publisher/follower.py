"""One rank of an engine that runs elsewhere, followed: from its sockets to its journal.

ZmqSource ─lots of steps, in turns─▶ EngineFeed ─▶ journal ─▶ on_lot: its owner takes what is new
                             └─ every 2,000 batches, and at the end ─▶ state file
listen_to_loads ─▶ EngineLoads

It knows no bus: `bridge.py` publishes what the journal says, a router may take it directly.
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
from router.publisher.engine_address import EngineAddress
from router.publisher.engine_events import decode_engine_batch
from router.publisher.engine_feed import EngineFeed
from router.publisher.engine_loads import EngineLoads
from router.publisher.engine_log import EngineLog, EngineLogSettings
from router.publisher.engine_position import SavedPosition
from router.publisher.engine_steps import Apply, ApplyDecoded, EngineLogCounters, Step
from router.publisher.kept_state import KeptState
from router.publisher.normalizer import Normalizer
from router.publisher.normalizer_state import SavedParts
from router.publisher.pacing import Pacing
from router.publisher.source_journal import SourceJournal
from router.publisher.turns import Turns
from router.publisher.zmq_loads import listen_to_loads
from router.publisher.zmq_sockets import Context
from router.publisher.zmq_source import SourceStatus, ZmqSource

log = logging.getLogger(__name__)

DECODED_BYTES = 1 << 18
"""Batches beyond are decoded by a thread, some 0.3 ms; the loop does what others need meanwhile."""


class FollowerSettings(Struct, frozen=True):
    """Of one rank. Without a `state_path` nothing is kept; `load_endpoint`: SGLang's."""

    address: EngineAddress
    load_endpoint: str | None = None
    state_path: Path | None = None
    max_fingerprints: int = 10_000


class FollowedLot(Struct, frozen=True):
    """What was just carried out: a lot off the sockets, or a slice of it. `since_s`: the moment
    after which it may have happened; `steps`: how many, none where only time has passed.
    """

    since_s: float
    now_s: float
    steps: int


OnLot: TypeAlias = Callable[[FollowedLot], None]


class FollowerCondition(StrEnum):
    """How well an engine is followed; each but the last leads to FOLLOWING by itself."""

    CONNECTING = "connecting"
    REPLAYING = "replaying"
    FOLLOWING = "following"
    BLIND = "blind"
    """Connected, but nothing can be replayed: what is lost stays lost."""


class FollowerStatus(Struct, frozen=True):
    """One rank, for operators. `problem`: of its sockets, or else of the last bad batch of its
    life; `silent_s`: since its last message.
    """

    address: EngineAddress
    condition: FollowerCondition
    problem: str | None
    silent_s: float | None


class EngineFollower:
    """Follower of one rank. Its journal and normaliser are new, and nobody else's.

    `on_lot` is called whenever steps were carried out or the journal has news, at once and before
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
        turns: Turns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._journal = journal
        self._settings = settings
        self._on_lot = on_lot
        self._pacing = pacing
        self._turns = turns
        self._clock = clock
        self._kept = KeptState(rank, settings.state_path)
        now_s = clock()
        self._log = EngineLog(
            now_s,
            EngineLogSettings(
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
        """Whom it follows."""
        return self._rank

    @property
    def log_counters(self) -> EngineLogCounters:
        """What happened to batches and replays."""
        return self._log.counters

    @property
    def as_of_s(self) -> float:
        """The moment up to which the journal has everything, as known after the last lot."""
        return self._as_of_s

    def waiting_s(self, now_s: float) -> float:
        """For how long anything that the engine published may have been missing."""
        return now_s - self._as_of_s if self._is_behind else self._log.waiting_s(now_s)

    def status(self, now_s: float) -> FollowerStatus:
        """What an operator wants to know. O(1)."""
        heard_s = self.source.heard_s
        silent_s = None if heard_s is None else now_s - heard_s
        return FollowerStatus(
            self._settings.address, self._condition(), self._present_problem(), silent_s
        )

    async def run(self, context: Context) -> None:
        """Follow the engine until cancelled, through all its lives; then keep the state."""
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
                self._is_behind = bool(steps)
                slices = self._take(steps)
                try:
                    await _decode_large(steps)
                    await self._turns.carry_out(slices)
                finally:  # what the log calls applied has to be
                    for _ in slices:
                        pass
                if self.feed.is_state_due and self._settings.state_path is not None:
                    await asyncio.shield(self._kept.keep(self._state))

    def _take(self, steps: Sequence[Step]) -> Iterator[None]:
        """Carry out a lot, slice by slice; not before the last are we where the log is."""
        left = len(steps)
        for ended in self.feed.slices(steps, self._clock):
            left -= ended
            self._is_behind = left > 0
            self._tell(ended)
            yield
        if not steps:
            self._tell(0)
            yield
        self._warn(self._clock())

    def _tell(self, steps: int) -> None:
        """Tell the journal's owner what was just carried out."""
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
            return f"no batch came yet: it was not used, or publishes another topic than {topic!r}"
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
    """Decode the large batches among some steps beside the loop; what is none is left as it is."""
    for place, step in enumerate(steps):
        if isinstance(step, Apply) and len(step.payload) > DECODED_BYTES:
            with suppress(WireError):
                batch = await asyncio.to_thread(decode_engine_batch, step.payload)
                steps[place] = ApplyDecoded(step.sequence, batch)
