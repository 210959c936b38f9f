"""The connection to NATS, and the streams and buckets that must exist there."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, TypeVar

from msgspec import Struct
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoServersError
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, BadRequestError, NotFoundError

from router.errors import ConfigError
from router.protocol.subjects import Subjects
from router.runtime.bus.client import CarefulClient, heeding_cancellation
from router.runtime.bus.errors import BusError, BusUnavailableError, LogConflictError, LogFullError
from router.runtime.process.redaction import redact
from router.runtime.security.nats_access import OPEN_ACCESS, NatsAccess

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2
RETRY_S = 1.0
SAID_AGAIN = 30
"""The number of attempts after which an unchanged reason is logged again."""

RECONNECT_S = 0.25
_WRONG_LAST_SEQUENCE = (10071, 10164)
_STREAM_FULL = 10077
_OTHER_CONFIGURATION = 10058
REQUEST_TIMEOUT_S = 5.0


class StreamLimits(Struct, frozen=True):
    """Limits of the event stream, applied when it is first created."""

    max_bytes: int = 1 << 30
    num_replicas: int = 1


class Bus:
    """A connection to NATS, with its JetStream.

    `closed` is set when the client has given up the connection, for example after a refused login.
    A mere loss is repaired by the client and does not set it. `problem`: the last error that the
    client reported.
    """

    __slots__ = ("_lost", "client", "closed", "js", "problem")

    def __init__(self, client: CarefulClient, closed: asyncio.Event) -> None:
        self.client = client
        self.closed = closed
        self.problem: Exception | None = None
        self.js: JetStreamContext = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note_loss(self) -> None:
        """Fail all open requests: the connection is lost, and no response will arrive."""
        self._lost.set_result(None)
        self._lost = asyncio.get_running_loop().create_future()

    async def send(self, subject: str, payload: bytes) -> None:
        """Publish at the end of this turn of the event loop. Waits only for a slow server.

        Raises BusUnavailableError, without a connection too.
        """
        if not self.client.is_connected:
            raise BusUnavailableError("not connected")
        try:
            self.client.send(subject.encode(), b"", payload)
            await self.client.written()
        except (NatsError, OSError) as error:
            raise BusUnavailableError(str(error) or type(error).__name__) from error

    async def answered(self, request: Coroutine[Any, Any, T]) -> T:
        """Return the response to a request.

        Raises BusUnavailableError as soon as the connection is lost.
        """
        answer = asyncio.create_task(request)
        try:
            await asyncio.wait((answer, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise BusUnavailableError("connection lost before the answer")
            return answer.result()
        finally:
            answer.cancel()


@asynccontextmanager
async def connection(
    url: str, name: str, on_change: Callable[[bool], None], access: NatsAccess = OPEN_ACCESS
) -> AsyncIterator[Bus]:
    """Return a connection that outlives restarts of the server. Waits until there is a server.

    `on_change` is called at each loss (False) and return (True). Leaving the context flushes
    published messages.
    """
    bus = await _connect(url, name, on_change, access)
    on_change(True)
    try:
        yield bus
    finally:
        on_change(False)
        with heeding_cancellation():
            await _close(bus.client)


async def live_on_bus(
    url: str,
    name: str,
    on_change: Callable[[bool], None],
    live: Callable[[Bus], Awaitable[None]],
    access: NatsAccess = OPEN_ACCESS,
) -> None:
    """Run `live` on a connection, and on a new one when it is given up, until cancelled.

    A BusError starts `live` again on a new connection; any other error is raised.
    """
    while True:
        async with connection(url, name, on_change, access) as bus:
            try:
                await live(bus)
            except* BusError as group:
                log.error("connecting to the bus again: %s", group.exceptions[0])
        await asyncio.sleep(RETRY_S)


async def until_closed(bus: Bus) -> None:
    """Wait until the client has given up the connection. Raises BusUnavailableError."""
    await bus.closed.wait()
    raise BusUnavailableError(f"connection closed: {bus.client.last_error}")


async def subscribe(bus: Bus, subject: str, queue: str = "") -> Subscription:
    """Return a core subscription, to iterate over. Raises BusUnavailableError."""
    async with translated(subject):
        return await bus.client.subscribe(subject, queue=queue)


_INBOXES = ("_INBOX", "_R_.")
"""The beginnings of inboxes: of clients, and of requests from another account."""

_INBOX_BYTES = tuple(each.encode() for each in _INBOXES)


def is_inbox(subject: str | bytes) -> bool:
    """Return whether a response may be sent to a subject.

    Otherwise a caller with the right to query could make this process write to any subject: those
    of this system, of the server, or of others on the same bus.
    """
    if isinstance(subject, bytes):
        return subject.startswith(_INBOX_BYTES)
    return subject.startswith(_INBOXES)


async def ensure_event_stream(
    js: JetStreamContext, subjects: Subjects, limits: StreamLimits
) -> None:
    """Create the event stream unless it exists; an existing one keeps its limits.

    It has no maximum age, and refuses new messages when it is full: a rank's history is the only
    copy of its state, and only its writer may shorten it.
    """
    config = api.StreamConfig(
        name=subjects.event_stream,
        subjects=[subjects.all_events],
        discard=api.DiscardPolicy.NEW,
        max_bytes=limits.max_bytes,
        num_replicas=limits.num_replicas,
        allow_rollup_hdrs=True,
        allow_direct=True,
        storage=api.StorageType.FILE,
    )
    await _unless_it_exists(subjects.event_stream, lambda: js.add_stream(config))


async def ensure_bucket(js: JetStreamContext, subjects: Subjects, num_replicas: int) -> None:
    """Create the key-value bucket of announcements unless it exists."""
    config = api.KeyValueConfig(
        bucket=subjects.bucket, history=1, replicas=num_replicas, direct=True
    )
    await _unless_it_exists(subjects.bucket, lambda: js.create_key_value(config))


async def ensure_object_stream(js: JetStreamContext, bucket: str, num_replicas: int) -> None:
    """Create the stream of an object store's bucket unless it exists, as NATS clients do."""
    config = api.StreamConfig(
        name=f"OBJ_{bucket}",
        subjects=[f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
        discard=api.DiscardPolicy.NEW,
        num_replicas=num_replicas,
        allow_rollup_hdrs=True,
        allow_direct=True,
        storage=api.StorageType.FILE,
    )
    await _unless_it_exists(bucket, lambda: js.add_stream(config))


async def last_message(js: JetStreamContext, stream: str, subject: str) -> api.RawStreamMsg | None:
    """Return the last message of a subject, or None. Raises BusUnavailableError."""
    async with translated(subject):
        try:
            return await js.get_last_msg(stream, subject, direct=True)
        except NotFoundError:
            return None


async def count_keys(js: JetStreamContext, subjects: Subjects, keys: str) -> int:
    """Return the number of keys of the bucket that match, and of those withdrawn within a day.

    Raises BusUnavailableError.
    """
    return len(await key_subjects(js, subjects, keys))


async def key_subjects(js: JetStreamContext, subjects: Subjects, keys: str) -> list[str]:
    """Return the subjects of those keys. Raises BusUnavailableError."""
    async with translated(keys):
        info = await js.stream_info(subjects.bucket_stream, subjects_filter=subjects.key(keys))
    return list(info.state.subjects or ())


@asynccontextmanager
async def translated(subject: str, expected_sequence: int = 0) -> AsyncIterator[None]:
    """Turn the client's exceptions into BusErrors."""
    try:
        with heeding_cancellation():
            yield
    except APIError as error:
        if error.err_code in _WRONG_LAST_SEQUENCE:
            raise LogConflictError(subject, expected_sequence) from error
        if error.err_code == _STREAM_FULL:
            raise LogFullError(subject) from error
        raise BusUnavailableError(str(error)) from error
    except (NatsError, OSError, TimeoutError) as error:
        raise BusUnavailableError(str(error) or type(error).__name__) from error


async def _unless_it_exists(name: str, create: Callable[[], Awaitable[object]]) -> None:
    """Create a stream or bucket; a different configuration of an existing one is no error.

    The server itself accepts a second creation with the same configuration.
    """
    async with translated(name):
        try:
            await create()
        except BadRequestError as error:
            if error.err_code != _OTHER_CONFIGURATION:
                raise


async def _connect(
    url: str, name: str, on_change: Callable[[bool], None], access: NatsAccess
) -> Bus:
    shown, attempts, last_reason = redact(url), count(), ""
    while True:
        bus = Bus(CarefulClient(), asyncio.Event())
        try:
            with heeding_cancellation():
                await _connect_once(bus, url, name, on_change, access)
        except (OSError, NatsError, TimeoutError, ConfigError) as error:
            before, last_reason = last_reason, _why_not(bus, error)
            if next(attempts) % SAID_AGAIN == 0 or last_reason != before:
                log.warning("no NATS at %s yet (%s); trying again", shown, last_reason)
            await asyncio.sleep(RETRY_S)
        else:
            log.info("connected to NATS at %s", shown)
            return bus


def _why_not(bus: Bus, error: Exception) -> str:
    """Return the reason of a failed connection.

    NoServersError does not state a cause; the client has reported it before.
    """
    cause = (isinstance(error, NoServersError) and bus.problem) or error
    return redact(str(cause)) or type(cause).__name__


async def _connect_once(
    bus: Bus, url: str, name: str, on_change: Callable[[bool], None], access: NatsAccess
) -> None:
    shown = redact(url)

    async def disconnected() -> None:
        bus.note_loss()
        if not bus.client.is_closed:
            log.warning("lost the connection to NATS at %s; reconnecting", shown)
            on_change(False)

    async def reconnected() -> None:
        log.warning("connected to NATS at %s again", shown)
        on_change(True)

    async def closed() -> None:
        bus.closed.set()

    async def failed(error: Exception) -> None:
        bus.problem = bus.problem if isinstance(error, NoServersError) else error
        log.debug("NATS: %r", error)

    try:
        # Attempts are limited for the first connection only, to report each failure.
        await bus.client.connect(
            url,
            name=name,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=CONNECT_TIMEOUT_S,
            ping_interval=5,
            error_cb=failed,
            disconnected_cb=disconnected,
            reconnected_cb=reconnected,
            closed_cb=closed,
            **access.options(url),
        )
    except BaseException:
        bus.client.abandon()
        raise
    bus.client.options.update(max_reconnect_attempts=-1, reconnect_time_wait=RECONNECT_S)


async def _close(client: CarefulClient) -> None:
    if client.is_connected:
        try:
            await client.flush(timeout=2)
        except (NatsError, TimeoutError):
            log.warning("could not flush the last messages to NATS")
    client.forget_unsent()
    # Closing a lost connection fails on the dead socket, which uvloop reports as RuntimeError.
    with suppress(OSError, RuntimeError):
        await client.close()
    client.abandon()
