"""The publisher of one rank's blocks: it appends the journal's messages to the rank's own subject.

The rank is the only writer of its subject, and every append states the sequence number it expects
to follow. A refused append means that another process wrote there, or that the store was lost; a
missing response, that the result is unknown. All these cases are handled in one way: read the end
of the log, verify that the worker id is still owned, and write a checkpoint. If the stream is full,
the rank's own history is removed first to make room: no other process may shorten it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from router.protocol.events import Checkpoint, LogMessage, encode_log_message
from router.protocol.values import HashArray, HeldState, Tier
from router.publisher.journal.journal import EventJournal
from router.runtime.bus.errors import BusError, LogFullError
from router.runtime.bus.transport import Transport

log = logging.getLogger(__name__)

VerifyOwner: TypeAlias = Callable[[], Awaitable[None]]

_BACKOFF_S = (0.05, 0.2, 1.0)

MIN_FLUSH_S = 0.02
MAX_FLUSH_S = 0.5
_FLUSH_S_PER_WORKER = 0.00025


def flush_window_s(workers: int) -> float:
    """Return the time for which events are collected into one message in a fleet of this size.

    It is chosen such that a router reads at most 4,000 messages a second, and is bounded by
    `MIN_FLUSH_S` and `MAX_FLUSH_S`.
    """
    return min(max(workers * _FLUSH_S_PER_WORKER, MIN_FLUSH_S), MAX_FLUSH_S)


class Published(Struct, frozen=True):
    """The published state of a rank: the last event delivered, and the digest after it."""

    event_id: int = 0
    state: HeldState = HeldState()


class KvEventPublisher:
    """The event publisher of one rank.

    `stored`, `removed` and `cleared` are synchronous and never wait; `run` delivers, at most one
    message per `flush_interval_s`. `verify_owner` is awaited before a log is taken over, and raises
    TwinError if the worker id is no longer owned. `failures`: messages that the bus did not accept;
    `refusals`: those among them that found the stream full.
    """

    def __init__(
        self,
        journal: EventJournal,
        subject: str,
        *,
        flush_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._subject = subject
        self._clock = clock
        self._life = journal.incarnation
        self._sequence: int | None = None
        self._log_is_full = False
        self._noted_since_s: float | None = clock()
        self._taken_since_s: float | None = None
        self.flush_interval_s = flush_interval_s
        self._news = asyncio.Event()
        self._news.set()
        self.published = Published()
        self.failures = 0
        self.refusals = 0

    @property
    def incarnation(self) -> int:
        """The current incarnation of the cache."""
        return self._journal.incarnation

    @property
    def reported_state(self) -> HeldState:
        """The digest after the last event in the log, and the doubts to report.

        These are the current doubts and, while changes wait, the published ones too: the waiting
        changes may be what ended those.
        """
        published, doubts = self.published.state, self._journal.doubts
        if self.waiting_s:
            doubts |= published.doubts
        return replace(published, doubts=doubts)

    @property
    def waiting_s(self) -> float:
        """The age of the oldest change that is not in the log yet, in seconds."""
        since_s = [s for s in (self._taken_since_s, self._noted_since_s) if s is not None]
        return max(self._clock() - min(since_s), 0.0) if since_s else 0.0

    def stored(self, tier: Tier, sequence_hashes: Sequence[int], parent: int | None) -> None:
        """Store consecutive blocks, the first after `parent`, in a tier."""
        naming = self._journal.naming
        self._journal.stored(tier, naming.listed(sequence_hashes), naming.parent(parent))
        self._record_events()

    def removed(self, tier: Tier, sequence_hashes: Sequence[int]) -> None:
        """Remove blocks from a tier."""
        self._journal.removed(tier, self._journal.naming.listed(sequence_hashes))
        self._record_events()

    def cleared(self, tier: Tier | None = None) -> None:
        """Remove everything from a tier, or from all tiers if it is None."""
        self._journal.cleared(tier)
        self._record_events()

    def new_life(self, incarnation: int) -> None:
        """Start a new life of the cache, which is empty."""
        self._journal.new_life(incarnation)
        self.noted(self._clock())

    def noted(self, since_s: float) -> None:
        """Process a change of the journal, or a new life in it, made by another component.

        `since_s`: the time after which it may have happened.
        """
        if self._life != self.incarnation:
            self._life = self.incarnation
            self.published = Published()
        self._record_events(since_s)

    def require_checkpoint(self) -> None:
        """Write a checkpoint next; requests before it is written count as one."""
        self._journal.require_checkpoint()
        self._record_events()

    def held(self, tier: Tier) -> HashArray:
        """Return all blocks held in a tier."""
        return self._journal.held(tier)

    async def run(self, transport: Transport, verify_owner: VerifyOwner) -> None:
        """Deliver messages until cancelled. Raises TwinError if `verify_owner` does."""
        self._sequence = None
        self.require_checkpoint()
        while True:
            await self._news.wait()
            next_s = self._clock() + self.flush_interval_s
            await self._deliver_surely(transport, verify_owner)
            await asyncio.sleep(max(next_s - self._clock(), 0.0))

    async def flush(self, transport: Transport, verify_owner: VerifyOwner) -> None:
        """Deliver all pending messages, regardless of how long the bus takes. Raises TwinError."""
        while self._journal.has_news:
            await self._deliver_surely(transport, verify_owner)

    async def _deliver_surely(self, transport: Transport, verify_owner: VerifyOwner) -> None:
        """Deliver the next message; if its delivery is uncertain, a checkpoint instead."""
        attempt = 0
        self._news.clear()
        while self._journal.has_news:
            try:
                await self._deliver_next(transport, verify_owner)
                break
            except BusError as error:
                # The messages may or may not have arrived; a checkpoint repeats their content.
                self._journal.require_checkpoint()
                self._note_failure(error)
                delay_s = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
                log.warning("%s: %s; a checkpoint follows in %g s", self._subject, error, delay_s)
                await asyncio.sleep(delay_s)
                attempt += 1

    async def _deliver_next(self, transport: Transport, verify_owner: VerifyOwner) -> None:
        sequence = self._sequence
        if sequence is None:
            await verify_owner()
            sequence = await self._take_over(transport)
        # Until the last append is acknowledged, the end of the log is unknown.
        self._sequence = None
        messages = self._take()
        told = self.incarnation, Published(self._journal.last_event_id, self._journal.taken_state)
        self._sequence = await self._deliver(transport, messages, sequence)
        self._log_is_full = False
        if told[0] == self.incarnation:
            self._taken_since_s = None
            self.published = told[1]

    async def _take_over(self, transport: Transport) -> int:
        """Return the sequence number of the log's end; drop the history if the stream is full."""
        sequence = await transport.last_sequence(self._subject)
        if self._log_is_full and sequence:
            await transport.drop_before(self._subject, sequence + 1)
            return await transport.last_sequence(self._subject)
        return sequence

    def _take(self) -> Sequence[LogMessage]:
        if self._taken_since_s is None:
            self._taken_since_s = self._noted_since_s
        self._noted_since_s = None
        return self._journal.take()

    def _record_events(self, since_s: float | None = None) -> None:
        if self._journal.has_news:
            noted_s = self._clock() if since_s is None else since_s
            known_s = self._noted_since_s
            self._noted_since_s = noted_s if known_s is None else min(known_s, noted_s)
        self._news.set()

    def _note_failure(self, error: BusError) -> None:
        self.failures += 1
        if isinstance(error, LogFullError):
            self.refusals += 1
            self._log_is_full = True

    async def _deliver(
        self, transport: Transport, messages: Sequence[LogMessage], sequence: int
    ) -> int:
        """Append messages. Returns the sequence number of the last one.

        A checkpoint replaces all earlier messages.
        """
        is_checkpoint = isinstance(messages[0], Checkpoint)
        first = None
        for message in messages:
            sequence = await transport.append(
                self._subject,
                encode_log_message(message),
                expected_sequence=sequence,
                replaces_history=is_checkpoint and len(messages) == 1,
            )
            first = sequence if first is None else first
        if first is not None and len(messages) > 1:
            await transport.drop_before(self._subject, first)
        return sequence
