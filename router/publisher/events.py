"""Publishes what one rank holds: the journal's messages, one at a time, to the rank's own subject.

The rank is the only writer of its subject, and every append names the sequence it expects to
follow. A refused append means that somebody else wrote there, or that the store was lost; a missing
answer, that nobody knows. All of them end the same way: find out where the log stands, make sure
the worker id is still ours, and write a checkpoint.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from msgspec import Struct

from router.errors import BusError
from router.protocol.events import Checkpoint, LogMessage, encode_log_message
from router.protocol.values import HashArray, HeldState, Tier
from router.publisher.journal import EventJournal
from router.publisher.transport import Transport

log = logging.getLogger(__name__)

VerifyOwner: TypeAlias = Callable[[], Awaitable[None]]

_BACKOFF_S = (0.05, 0.2, 1.0, 5.0)


class Published(Struct, frozen=True):
    """What routers can know of a rank: the last event delivered, and what was held after it."""

    event_id: int = 0
    state: HeldState = HeldState()


class KvEventPublisher:
    """Event publisher of one rank.

    `stored`, `removed` and `cleared` are synchronous and never wait; `run` delivers.
    `verify_owner` is awaited before a log is taken over, and raises TwinError if the
    worker id is no longer ours.
    """

    def __init__(
        self,
        journal: EventJournal,
        subject: str,
        *,
        flush_interval_s: float,
    ) -> None:
        self._journal = journal
        self._subject = subject
        self._flush_interval_s = flush_interval_s
        self._sequence: int | None = None
        self._news = asyncio.Event()
        self._news.set()
        self.published = Published()
        self.failures = 0

    def stored(self, tier: Tier, sequence_hashes: Sequence[int], parent: int | None) -> None:
        """Consecutive blocks, the first after `parent`, are now in this tier."""
        self._journal.stored(tier, sequence_hashes, parent)
        self._news.set()

    def removed(self, tier: Tier, sequence_hashes: Sequence[int]) -> None:
        """Blocks are no longer in this tier."""
        self._journal.removed(tier, sequence_hashes)
        self._news.set()

    def cleared(self, tier: Tier | None = None) -> None:
        """A tier is empty; None: all are."""
        self._journal.cleared(tier)
        self._news.set()

    def require_checkpoint(self) -> None:
        """Write a checkpoint next; requests before it is written count as one."""
        self._journal.require_checkpoint()
        self._news.set()

    def held(self, tier: Tier) -> HashArray:
        """Every block held in this tier."""
        return self._journal.held(tier)

    async def run(self, transport: Transport, verify_owner: VerifyOwner) -> None:
        """Deliver news until cancelled, at most one message per flush interval.

        `verify_owner` is awaited before a log is taken over; it raises TwinError if the
        worker id is no longer ours, which ends the run.
        """
        self._sequence = None
        self.require_checkpoint()
        while True:
            await self._news.wait()
            self._news.clear()
            await self.flush(transport, verify_owner)
            await asyncio.sleep(self._flush_interval_s)

    async def flush(self, transport: Transport, verify_owner: VerifyOwner) -> None:
        """Deliver everything noted so far, however long the bus takes. Raises TwinError."""
        attempt = 0
        while self._journal.has_news:
            try:
                await self._deliver_next(transport, verify_owner)
                attempt = 0
            except BusError as error:
                # What was taken may or may not have arrived; a checkpoint says it again.
                self._journal.require_checkpoint()
                self.failures += 1
                delay_s = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
                log.warning("%s: %s; a checkpoint follows in %g s", self._subject, error, delay_s)
                await asyncio.sleep(delay_s)
                attempt += 1

    async def _deliver_next(self, transport: Transport, verify_owner: VerifyOwner) -> None:
        sequence = self._sequence
        if sequence is None:
            await verify_owner()
            sequence = await transport.last_sequence(self._subject)
        # Until the last append is acknowledged nobody knows where the log stands.
        self._sequence = None
        self._sequence = await self._deliver(transport, self._journal.take(), sequence)
        self.published = Published(self._journal.last_event_id, self._journal.taken_state)

    async def _deliver(
        self, transport: Transport, messages: Sequence[LogMessage], sequence: int
    ) -> int:
        """Append messages; the sequence of the last. A checkpoint replaces what was before it."""
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
