"""A JetStream stream, read in order without acks; reading resumes after any fault.

Reader of a stream in order, without acks, which resumes after any fault.

A consumer is temporary: on the first fault (a gap in its own numbering, a missed heartbeat, an
error) it is dropped, and a new one starts behind the last stream sequence read.

    open ──▶ Message … Message ──▶ CaughtUp ──▶ Message …
      ▲                                            │ any fault
      └────────────────────────────────────────────┘   (Restarted first, if the stream is a new one)
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Protocol, TypeAlias

from msgspec import Struct
from nats.aio.msg import Msg
from nats.js import api

from router.protocol.values import StreamPosition
from router.runtime.bus.connection import Bus, translated
from router.runtime.bus.errors import BusUnavailableError

log = logging.getLogger(__name__)

RETRY_S = 0.25


class Delivery(Struct, frozen=True, gc=False):
    """A message as delivered to a consumer.

    `consumer_sequence` counts its deliveries from 1; `pending` messages are still to come.
    """

    subject: str
    payload: bytes
    headers: Mapping[str, str]
    stream_sequence: int
    consumer_sequence: int
    pending: int


class StreamState(Struct, frozen=True):
    """The identity and extent of a stream. `created` differs after the stream was recreated."""

    created: str
    last_sequence: int

    @property
    def end(self) -> StreamPosition:
        """The position behind the last message."""
        return StreamPosition(self.created, self.last_sequence)


class Consumer(Protocol):
    """A consumer of a stream from some sequence on; `pending` messages existed at its start."""

    pending: int

    async def next(self) -> Delivery:
        """Return the next message, without time limit. Raises BusUnavailableError on any fault."""


class StreamSource(Protocol):
    """The store of a stream."""

    async def state(self) -> StreamState:
        """Return the state of the stream, created if missing. Raises BusUnavailableError."""

    def consume(
        self, after_sequence: int, *, latest_only: bool
    ) -> AbstractAsyncContextManager[Consumer]:
        """Open a consumer of the messages behind a sequence. Raises BusUnavailableError.

        `latest_only`: only the last message of each subject is delivered; the sequence must be 0.
        """


class Message(Struct, frozen=True, gc=False):
    """A message of the stream."""

    subject: str
    payload: bytes
    headers: Mapping[str, str]


class CaughtUp(Struct, frozen=True):
    """All messages that were in the stream when it was opened have been read."""


class Restarted(Struct, frozen=True):
    """The stream was deleted and recreated: earlier messages have no relation to later ones."""


Item: TypeAlias = Message | CaughtUp | Restarted


class StreamReader:
    """Reader of one stream. `latest_only`: of the past, only the last message of each subject.

    `after`: the position of an earlier reader, to resume from if the stream is still the same.
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
        """The position up to which the stream was read; None before it was opened."""
        return None if self._created is None else StreamPosition(self._created, self._position)

    def take_reopened(self) -> int:
        """Return how often the stream was reopened since the last call."""
        reopened, self._reopened = self._reopened, 0
        return reopened

    async def read(self) -> AsyncGenerator[Item, None]:
        """Yield items endlessly; only cancellation stops it."""
        while True:
            try:
                if await self._is_new():
                    yield Restarted()
                async with aclosing(self._read_consumer()) as items:
                    async for item in items:
                        yield item
            except BusUnavailableError as error:
                log.debug("stream reader failed: %s; reopening the stream", error)
                self._reopened += 1
                await asyncio.sleep(RETRY_S)

    async def _is_new(self) -> bool:
        """Return whether this is a different stream than the last one read, or a truncated one."""
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


_BATCH = 256
_EXPIRES_S = 30.0
_HEARTBEAT_S = 0.4
_SILENCE_S = 1.0
_INACTIVE_S = 30.0
_ACK_TOKENS = 9
_ACK_SEQUENCE, _ACK_SEQUENCE_IN_DOMAIN = 5, 7
"""Token positions in `$JS.ACK.` (domain, account,) stream, consumer, deliveries, sequences, time,
pending.
"""

_HEARTBEAT_STATUS = "100"
_PULL_ENDED_STATUSES = ("404", "408")


class NatsStream:
    """One stream on a bus; `ensure` creates it if it is missing."""

    def __init__(self, bus: Bus, stream: str, ensure: Callable[[], Awaitable[None]]) -> None:
        self._bus = bus
        self._stream = stream
        self._ensure = ensure

    async def state(self) -> StreamState:
        """Return the state of the stream. See `StreamSource`; takes a few round trips."""
        if not self._bus.client.is_connected:
            raise BusUnavailableError("not connected")
        await self._ensure()
        async with translated(self._stream):
            info = await self._bus.js.stream_info(self._stream)
        return StreamState(str(info.created), info.state.last_seq)

    @asynccontextmanager
    async def consume(
        self, after_sequence: int, *, latest_only: bool
    ) -> AsyncIterator["_PullConsumer"]:
        """Open a temporary consumer, which the server keeps in memory. See `StreamSource`."""
        inbox = self._bus.client.new_inbox()
        arrived: asyncio.Queue[Msg] = asyncio.Queue()

        # Iterating creates a task per message, which takes longer than all other work on it.
        async def keep(message: Msg) -> None:
            arrived.put_nowait(message)

        async with translated(self._stream):
            # The buffer fits a whole pull of the largest messages: the client drops any excess.
            room_bytes = _BATCH * self._bus.client.max_payload
            subscription = await self._bus.client.subscribe(
                inbox, cb=keep, pending_bytes_limit=room_bytes
            )
            try:
                config = _config(after_sequence, latest_only=latest_only)
                info = await self._bus.js.add_consumer(self._stream, config)
                yield _PullConsumer(self._bus, arrived, inbox, info)
            finally:
                if not self._bus.client.is_closed:
                    await subscription.unsubscribe()


class _PullConsumer:
    """A pull consumer that requests more messages as they are used up.

    The buffer of arrived messages is bounded by the size of one request.
    """

    def __init__(
        self, bus: Bus, arrived: asyncio.Queue[Msg], inbox: str, info: api.ConsumerInfo
    ) -> None:
        self.pending = info.num_pending or 0
        self._bus = bus
        self._arrived = arrived
        self._inbox = inbox
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{info.stream_name}.{info.name}"
        self._wanted = 0

    async def next(self) -> Delivery:
        while True:
            if not self._wanted:
                await self._ask_for_more()
            message = await _next(self._arrived)
            if not _is_status(message):
                self._wanted -= 1
                return _delivery(message)
            if _ends_pull(message):
                self._wanted = 0

    async def _ask_for_more(self) -> None:
        request = {
            "batch": _BATCH,
            "expires": int(_EXPIRES_S * 1e9),
            "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
        }
        await self._bus.client.publish(
            self._subject, json.dumps(request).encode(), reply=self._inbox
        )
        self._wanted = _BATCH


def _config(after_sequence: int, *, latest_only: bool) -> api.ConsumerConfig:
    config = api.ConsumerConfig(
        ack_policy=api.AckPolicy.NONE,
        mem_storage=True,
        num_replicas=1,
        inactive_threshold=_INACTIVE_S,
    )
    if after_sequence:
        config.deliver_policy = api.DeliverPolicy.BY_START_SEQUENCE
        config.opt_start_seq = after_sequence + 1
    elif latest_only:
        config.deliver_policy = api.DeliverPolicy.LAST_PER_SUBJECT
        config.filter_subject = ">"
    return config


def _delivery(message: Msg) -> Delivery:
    # The client's own `metadata` also parses the time into a date, which is not used here.
    tokens = message.reply.split(".")
    first = _ACK_SEQUENCE if len(tokens) == _ACK_TOKENS else _ACK_SEQUENCE_IN_DOMAIN
    if len(tokens) < first + 4:
        raise BusUnavailableError(f"consumer sent a message of no stream: {message.reply!r}")
    return Delivery(
        message.subject,
        message.data,
        message.headers or {},
        int(tokens[first]),
        int(tokens[first + 1]),
        int(tokens[first + 3]),
    )


def _is_status(message: Msg) -> bool:
    return "Status" in (message.headers or {})


def _ends_pull(message: Msg) -> bool:
    """Return whether a status message ends the current pull; heartbeats do not.

    Raises BusUnavailableError for any other status.
    """
    status = (message.headers or {})["Status"]
    if status not in (_HEARTBEAT_STATUS, *_PULL_ENDED_STATUSES):
        raise BusUnavailableError(f"consumer sent status {status}")
    return status != _HEARTBEAT_STATUS


async def _next(arrived: asyncio.Queue[Msg]) -> Msg:
    if not arrived.empty():
        return arrived.get_nowait()
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await arrived.get()
    except TimeoutError as error:
        raise BusUnavailableError(f"no heartbeat for {_SILENCE_S} s") from error
