"""The follower of one rank of a polled engine: from responses to its journal.

TrtllmPull ─batches─▶ PullLog ─steps─▶ EngineFeed ─▶ journal ─▶ on_lot
                                         └─ every 2,000 batches, and at the end ─▶ state file

Its interface for publishers is that of `follower.py`, which follows engines that stream.

The order of one rank's events where the engine is polled, and the life they belong to.

TensorRT-LLM numbers events from 0 in every life and returns each of them once, to the first client
that requests it. So no event can be requested again: a gap is a loss of unknown content, which
voids the blocks held before; numbers that go back start a new life.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import httpx
from msgspec import Struct

from router.errors import WireError
from router.protocol.values import Rank
from router.publisher.batch_order.address import EngineAddress
from router.publisher.batch_order.batch_order import UNKNOWN_S
from router.publisher.batch_order.position import SavedPosition
from router.publisher.batch_order.steps import ApplyDecoded, BatchOrderCounters, Lost, NewLife, Step
from router.publisher.engine_events.batch import EngineBatch
from router.publisher.engine_events.trtllm import TrtllmAnswer, TrtllmBatch, decode_trtllm_events
from router.publisher.engine_metrics.loads import EngineLoads
from router.publisher.feed.engine_feed import EngineFeed
from router.publisher.follower.follower import (
    EngineFollower,
    FollowedLot,
    FollowerCondition,
    FollowerStatus,
    OnLot,
)
from router.publisher.follower.http_fetch import fetch, poll_forever
from router.publisher.follower.state import StateFile
from router.publisher.journal.consolidator import SourceJournal
from router.publisher.normalizer.normalizer import Normalizer
from router.publisher.zmq.sockets import Context
from router.publisher.zmq.source import SourceStatus

_TOLD = "returned before the first request, or to another client, or in a lost response"


class PollOrder:
    """The order of one rank's polled events. `cursor`: the id of the next event."""

    __slots__ = ("cursor",)

    def __init__(self, cursor: int = 0) -> None:
        self.cursor = cursor

    def take(self, batch: TrtllmBatch) -> list[Step]:
        """Return the steps for a batch."""
        first, cursor = batch.first_event_id, self.cursor
        steps: list[Step] = []
        if first < cursor:
            steps.append(NewLife(f"event {first} arrived, but {cursor} was expected"))
            cursor = 0
        if first > cursor:
            steps.append(Lost(cursor, first - 1, _TOLD))
        steps.append(ApplyDecoded(first, batch))
        self.cursor = batch.last_event_id + 1
        return steps


log = logging.getLogger(__name__)

TICK_S = 0.1


class PullSettings(Struct, frozen=True):
    """The settings of one rank. `url`: the engine's; `state_path`: None saves no state."""

    url: str
    state_path: Path | None = None


class PullFollower:
    """A follower of one rank. Its journal and normaliser must be new and unshared."""

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
        self._kept = StateFile(rank, settings.state_path)
        now_s = clock()
        saved = self._kept.restored(normalizer, now_s)
        self._log = PollOrder(0 if saved is None else saved.cursor)
        self._proven_s = now_s - UNKNOWN_S
        self.feed = EngineFeed(journal, normalizer, rank.dp_rank)
        self.engine_loads = EngineLoads(rank.dp_rank, journal.identity.block_size)
        self.source = SourceStatus()
        self.log_counters = BatchOrderCounters()

    @property
    def rank(self) -> Rank:
        """The rank of the engine."""
        return self._rank

    def waiting_s(self, now_s: float) -> float:
        """Return for how long events may have been missing: since the last successful request."""
        return now_s - self._proven_s

    def status(self, now_s: float) -> FollowerStatus:
        """Return the state of the rank for operators."""
        last_seen_s = self.source.last_seen_s
        is_known = last_seen_s is not None and self.source.problem is None
        condition = FollowerCondition.FOLLOWING if is_known else FollowerCondition.CONNECTING
        silent_s = None if last_seen_s is None else now_s - last_seen_s
        problem = self.source.problem or self.feed.problem
        return FollowerStatus(self._address, condition, problem, silent_s)

    def pulled(
        self, batches: Sequence[TrtllmBatch], malformed: Sequence[str], asked_s: float
    ) -> None:
        """Process the response to a request made at `asked_s`.

        `batches`: those of this rank; `malformed`: errors of events that belong to no rank.
        """
        if self.source.last_seen_s is None or self.source.problem is not None:
            self.source.connections += 1
        self.source.problem = None
        self.source.last_seen_s = self._clock()
        self.source.messages += 1
        steps = [step for batch in batches for step in self._log.take(batch)]
        if malformed:
            nothing = EngineBatch(None, [], [], list(malformed))
            steps.append(ApplyDecoded(self._log.cursor, nothing))
        self._take(steps, asked_s)

    def failed(self, problem: str) -> None:
        """Record a missing or unreadable response; its events will be missing in the next one."""
        self.source.failed_connections += 1
        self.source.problem = problem

    async def run(self, _: Context) -> None:
        """Process the passing of time until cancelled; then save the state."""
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
        """Save a copy of the state, so that polling does not wait for the disk."""
        state = SavedPosition(self._log.cursor, b""), [bytes(part) for part in self.feed.save()]
        await asyncio.shield(self._kept.keep(lambda: state))


Follower: TypeAlias = EngineFollower | PullFollower
"""A follower of an engine that streams its events, or of one that is polled for them."""


TIMEOUT_S = 5.0
"""The request timeout. Releases before 1.1 wait 2 s before they respond with no events."""
LIMIT_BYTES = 32 << 20
MAX_PAUSE_S = 2.0


class TrtllmPoller:
    """A poller of one server. It must be the only client: each event is returned once."""

    def __init__(
        self,
        url: str,
        followers: Sequence[PullFollower],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._followers = followers
        self._interval_s = interval_s
        self._clock = clock
        self._problem: str | None = None

    async def run(self) -> None:
        """Poll until cancelled; less often after failures."""
        await poll_forever(
            self._poll,
            timeout_s=TIMEOUT_S,
            interval_s=self._interval_s,
            max_pause_s=MAX_PAUSE_S,
        )

    async def _poll(self, client: httpx.AsyncClient) -> bool:
        """Make one request. Returns whether it succeeded."""
        asked_s = self._clock()
        try:
            body = await fetch(
                client, "POST", self._url, limit_bytes=LIMIT_BYTES, timeout_s=TIMEOUT_S
            )
            answer = decode_trtllm_events(body)
        except WireError as error:
            self._failed(error.reason)
            return False
        self._problem = None
        self._share(answer, asked_s)
        return True

    def _share(self, answer: TrtllmAnswer, asked_s: float) -> None:
        """Pass each rank its own events; events without a rank belong to the first one."""
        for place, follower in enumerate(self._followers):
            ours = (follower.rank.dp_rank, None) if place == 0 else (follower.rank.dp_rank,)
            batches = [batch for batch in answer.batches if batch.dp_rank in ours]
            follower.pulled(batches, answer.malformed, asked_s)

    def _failed(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("cannot request events from %s: %s; trying again", self._url, problem)
        self._problem = problem
        for follower in self._followers:
            follower.failed(f"cannot request events from {self._url}: {problem}")
