"""A JetStream stream, read by pull consumers without acks."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from nats.aio.msg import Msg
from nats.js import api

from router.bus_errors import BusUnavailableError
from router.publisher.bus import Bus, translated
from router.stream_reader import Delivery, StreamState

_BATCH = 256
_EXPIRES_S = 30.0
_HEARTBEAT_S = 0.4
_SILENCE_S = 1.0
_INACTIVE_S = 30.0
_ACK_TOKENS = 9
_ACK_SEQUENCE, _ACK_SEQUENCE_IN_DOMAIN = 5, 7
"""`$JS.ACK.` (domain, account,) stream, consumer, deliveries, sequences, time, pending."""

_HEARTBEAT_STATUS = "100"
_PULL_ENDED_STATUSES = ("404", "408")


class NatsStream:
    """One stream on a bus; `ensure` makes it where there is none."""

    def __init__(self, bus: Bus, stream: str, ensure: Callable[[], Awaitable[None]]) -> None:
        self._bus = bus
        self._stream = stream
        self._ensure = ensure

    async def state(self) -> StreamState:
        """See `StreamSource`; a few round trips."""
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
        """See `StreamSource`; a throw-away consumer in the server's memory."""
        inbox = self._bus.client.new_inbox()
        arrived: asyncio.Queue[Msg] = asyncio.Queue()

        # Iterating makes a task for every message, which takes longer than all else we do with it.
        async def keep(message: Msg) -> None:
            arrived.put_nowait(message)

        async with translated(self._stream):
            # Room for a whole pull of the largest messages: beyond it the client drops silently.
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
    """Asks for more messages as they are used up. What has arrived is bounded by what was asked."""

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
    # The client's own `metadata` also makes a date of the time, which nobody wants.
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
    """Heartbeats do not; what is neither a heartbeat nor an end speaks against the consumer."""
    status = (message.headers or {})["Status"]
    if status not in (_HEARTBEAT_STATUS, *_PULL_ENDED_STATUSES):
        raise BusUnavailableError(f"consumer answered {status}")
    return status != _HEARTBEAT_STATUS


async def _next(arrived: asyncio.Queue[Msg]) -> Msg:
    if not arrived.empty():
        return arrived.get_nowait()
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await arrived.get()
    except TimeoutError as error:
        raise BusUnavailableError(f"no heartbeat for {_SILENCE_S} s") from error
