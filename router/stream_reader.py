"""Reads a stream in order, without acks, and goes on where it stopped after any fault.

A consumer is a throw-away: on the first doubt (a gap in its own numbering, a missed heartbeat, an
error) it is dropped, and a new one starts behind the last stream sequence read.

    open ──▶ Message … Message ──▶ CaughtUp ──▶ Message …
      ▲                                            │ any doubt
      └────────────────────────────────────────────┘   (Restarted first, if the stream is a new one)
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol, TypeAlias

from msgspec import Struct

from router.bus_errors import BusUnavailableError
from router.protocol.values import StreamPosition

log = logging.getLogger(__name__)

RETRY_S = 0.25


class Delivery(Struct, frozen=True, gc=False):
    """A message as a consumer got it. `consumer_sequence` counts its deliveries, from 1; `pending`
    messages are yet to come.
    """

    subject: str
    payload: bytes
    headers: Mapping[str, str]
    stream_sequence: int
    consumer_sequence: int
    pending: int


class StreamState(Struct, frozen=True):
    """Which stream this is, and how far it goes. `created` differs once it was made anew."""

    created: str
    last_sequence: int

    @property
    def end(self) -> StreamPosition:
        """The position behind the last message."""
        return StreamPosition(self.created, self.last_sequence)


class Consumer(Protocol):
    """Messages of a stream, from some sequence on; `pending` of them were there at its start."""

    pending: int

    async def next(self) -> Delivery:
        """The next message, however long it takes. Raises BusUnavailableError on any doubt."""


class StreamSource(Protocol):
    """Where a stream is kept."""

    async def state(self) -> StreamState:
        """The state of the stream, which is made where there is none. Raises
        BusUnavailableError.
        """

    def consume(
        self, after_sequence: int, *, latest_only: bool
    ) -> AbstractAsyncContextManager[Consumer]:
        """Messages behind a sequence. `latest_only`: of each subject, the last; the sequence is 0
        then. Raises BusUnavailableError.
        """


class Message(Struct, frozen=True, gc=False):
    """A message of the stream."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]


class CaughtUp(Struct, frozen=True):
    """Everything that was in the stream when it was opened has been read."""


class Restarted(Struct, frozen=True):
    """The stream was wiped and made anew: what was read before says nothing about what follows."""


Item: TypeAlias = Message | CaughtUp | Restarted


class StreamReader:
    """Reader of one stream. `latest_only`: of the past, only the last message of each subject.

    `after`: where an earlier reader stood; it is gone on from there, if the stream is still that.
    """

    def __init__(
        self,
        source: StreamSource,
        *,
        latest_only: bool = False,
        after: StreamPosition | None = None,
    ) -> None:
        self._source = source
        self._latest_only = latest_only
        self._position = 0 if after is None else after.sequence
        self._created = None if after is None else after.created
        self._reopened = 0

    @property
    def position(self) -> StreamPosition | None:
        """How far the stream was read; None before it was opened."""
        return None if self._created is None else StreamPosition(self._created, self._position)

    def take_reopened(self) -> int:
        """How often the stream was opened again since the last call."""
        reopened, self._reopened = self._reopened, 0
        return reopened

    async def read(self) -> AsyncGenerator[Item, None]:
        """Items, without end; only cancellation stops it."""
        while True:
            try:
                if await self._is_new():
                    yield Restarted()
                async with aclosing(self._read_consumer()) as items:
                    async for item in items:
                        yield item
            except BusUnavailableError as error:
                log.debug("reading a stream: %s; opening it again", error)
                self._reopened += 1
                await asyncio.sleep(RETRY_S)

    async def _is_new(self) -> bool:
        """Whether this is another stream than the one read so far, or the same cut short."""
        state = await self._source.state()
        known, self._created = self._created, state.created
        if known in (None, state.created) and state.last_sequence >= self._position:
            return False
        self._position = 0
        return known is not None

    async def _read_consumer(self) -> AsyncGenerator[Item, None]:
        is_first_read = self._latest_only and not self._position
        async with self._source.consume(self._position, latest_only=is_first_read) as consumer:
            delivered, is_caught_up = 0, not consumer.pending
            if is_caught_up:
                yield CaughtUp()
            while True:
                message = await consumer.next()
                delivered += 1
                if message.consumer_sequence != delivered:
                    raise BusUnavailableError("a message was lost on the way")
                self._position = message.stream_sequence
                yield Message(message.subject, message.payload, message.headers)
                if not is_caught_up and not message.pending:
                    is_caught_up = True
                    yield CaughtUp()
