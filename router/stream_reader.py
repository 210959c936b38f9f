"""Reads a JetStream stream in order, without acks, and goes on where it stopped after any fault.

The consumer is a throw-away: on the first doubt (a gap in its own numbering, a missed heartbeat, an
error) it is dropped, and a new one starts at the last stream sequence read plus one.

    open ──▶ Message … Message ──▶ CaughtUp ──▶ Message …
      ▲                                            │ any doubt
      └────────────────────────────────────────────┘   (Restarted first, if the stream is a new one)
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from datetime import datetime
from typing import TypeAlias

from msgspec import Struct
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api

from router.errors import BusUnavailableError
from router.publisher.bus import Bus, translated

log = logging.getLogger(__name__)

_BATCH = 256
_EXPIRES_S = 30.0
_HEARTBEAT_S = 0.4
_SILENCE_S = 1.0
_RETRY_S = 0.25
_INACTIVE_S = 30.0
_HEARTBEAT_STATUS = "100"
_PULL_ENDED_STATUSES = ("404", "408")


class Message(Struct, frozen=True):
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
    """Reader of one stream. `latest_only`: of the past, only the last message of each subject."""

    def __init__(
        self,
        bus: Bus,
        stream: str,
        ensure: Callable[[], Awaitable[None]],
        *,
        latest_only: bool = False,
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._ensure = ensure
        self._latest_only = latest_only
        self._position = 0
        self._created: datetime | None = None
        self._reopened = 0

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
                log.debug("reading %s: %s; opening it again", self._stream, error)
                self._reopened += 1
                await asyncio.sleep(_RETRY_S)

    async def _is_new(self) -> bool:
        """Whether this is another stream than the one read so far, or the same cut short."""
        if not self._bus.client.is_connected:
            raise BusUnavailableError("not connected")
        await self._ensure()
        async with translated(self._stream):
            info = await self._bus.js.stream_info(self._stream)
        known, self._created = self._created, info.created
        if known in (None, info.created) and info.state.last_seq >= self._position:
            return False
        self._position = 0
        return known is not None

    async def _read_consumer(self) -> AsyncGenerator[Item, None]:
        inbox = self._bus.client.new_inbox()
        async with translated(self._stream):
            # Room for a whole pull of the largest messages: beyond it the client drops silently.
            room_bytes = _BATCH * self._bus.client.max_payload
            subscription = await self._bus.client.subscribe(inbox, pending_bytes_limit=room_bytes)
            try:
                consumer = await self._bus.js.add_consumer(self._stream, self._config())
                async with aclosing(self._pull(subscription, inbox, consumer)) as items:
                    async for item in items:
                        yield item
            finally:
                if not self._bus.client.is_closed:
                    await subscription.unsubscribe()

    async def _pull(
        self, subscription: Subscription, inbox: str, consumer: api.ConsumerInfo
    ) -> AsyncGenerator[Item, None]:
        wanted, delivered, is_caught_up = 0, 0, not consumer.num_pending
        if is_caught_up:
            yield CaughtUp()
        while True:
            if not wanted:
                await self._ask_for_more(inbox, consumer.name)
                wanted = _BATCH
            message = await _next(subscription)
            if _is_status(message):
                wanted = 0 if _ends_pull(message) else wanted
                continue
            wanted, delivered = wanted - 1, delivered + 1
            if message.metadata.sequence.consumer != delivered:
                raise BusUnavailableError("a message was lost on the way")
            self._position = message.metadata.sequence.stream
            yield Message(message.subject, message.data, message.headers or {})
            if not is_caught_up and not message.metadata.num_pending:
                is_caught_up = True
                yield CaughtUp()

    async def _ask_for_more(self, inbox: str, consumer: str) -> None:
        request = {
            "batch": _BATCH,
            "expires": int(_EXPIRES_S * 1e9),
            "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{consumer}"
        await self._bus.client.publish(subject, json.dumps(request).encode(), reply=inbox)

    def _config(self) -> api.ConsumerConfig:
        config = api.ConsumerConfig(
            ack_policy=api.AckPolicy.NONE,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=_INACTIVE_S,
        )
        if self._position:
            config.deliver_policy = api.DeliverPolicy.BY_START_SEQUENCE
            config.opt_start_seq = self._position + 1
        elif self._latest_only:
            config.deliver_policy = api.DeliverPolicy.LAST_PER_SUBJECT
            config.filter_subject = ">"
        return config


def _is_status(message: Msg) -> bool:
    return "Status" in (message.headers or {})


def _ends_pull(message: Msg) -> bool:
    """Heartbeats do not; what is neither a heartbeat nor an end speaks against the consumer."""
    status = (message.headers or {})["Status"]
    if status not in (_HEARTBEAT_STATUS, *_PULL_ENDED_STATUSES):
        raise BusUnavailableError(f"consumer answered {status}")
    return status != _HEARTBEAT_STATUS


async def _next(subscription: Subscription) -> Msg:
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await anext(subscription.messages)
    except TimeoutError as error:
        raise BusUnavailableError(f"no heartbeat for {_SILENCE_S} s") from error
    except StopAsyncIteration as error:
        raise BusUnavailableError("connection closed") from error
