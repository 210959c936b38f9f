"""The connection to NATS, and what has to exist there."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from typing import Any, TypeVar

from msgspec import Struct
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoServersError
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, BadRequestError, NotFoundError

from router.bus_errors import BusError, BusUnavailableError, LogConflictError, LogFullError
from router.errors import ConfigError
from router.masking import masked
from router.protocol.subjects import Subjects
from router.security.nats_access import OPEN_ACCESS, NatsAccess

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2
RETRY_S = 1.0
SAID_AGAIN = 30
"""Attempts until the same reason is logged once more."""

RECONNECT_S = 0.25
_WRONG_LAST_SEQUENCE = (10071, 10164)
_STREAM_FULL = 10077
_OTHER_CONFIGURATION = 10058
REQUEST_TIMEOUT_S = 5.0


class StreamLimits(Struct, frozen=True):
    """Limits of the event stream, applied when it is first created."""

    max_bytes: int = 1 << 30
    num_replicas: int = 1


class CarefulClient(Client):
    """A client that says nothing to a server without TLS where its URL says tls://, that no message
    disconnects, and that leaves nothing open. The library would go on as with nats://, and send its
    login to whoever answers; it gives a connection up, for seconds, that brings a message it cannot
    read; and it forgets a connection on which nobody greeted it in time.
    """

    def abandon(self) -> None:
        """Close whatever is open."""
        if self._transport:
            self._transport.close()  # type: ignore[no-untyped-call]

    def forget_unsent(self) -> None:
        """Forget what nobody can be told any more."""
        if not self.is_connected:
            self._pending, self._pending_data_size = [], 0

    async def _connect_to_server(self, *server: Any) -> None:
        """Connect, and to nobody else."""
        self.abandon()
        await super()._connect_to_server(*server)

    def _connect_command(self) -> bytes:
        """What is sent first, the login included."""
        server = self._current_server
        wants_tls = server is not None and server.uri.scheme == "tls"
        if wants_tls and not self._server_info.get("tls_required"):
            raise NatsError("the server offers no TLS, and the URL says tls://")
        return super()._connect_command()

    async def _process_msg(self, *message: Any) -> None:
        """Take in a message; drop one whose subjects or headers are none."""
        try:
            await super()._process_msg(*message)
        except (UnicodeDecodeError, IndexError) as error:
            log.debug("dropped a message that cannot be read: %r", error)


class Bus:
    """A connection to NATS, with its JetStream; `closed` is set when the client has given it up (a
    refused login, say). A mere loss heals by itself and does not set it. `problem`: the last one
    that the client told.
    """

    __slots__ = ("_lost", "client", "closed", "js", "problem")

    def __init__(self, client: CarefulClient, closed: asyncio.Event) -> None:
        self.client = client
        self.closed = closed
        self.problem: Exception | None = None
        self.js: JetStreamContext = client.jetstream(timeout=REQUEST_TIMEOUT_S)
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note_loss(self) -> None:
        """The connection is lost: what was asked on it is never answered."""
        self._lost.set_result(None)
        self._lost = asyncio.get_running_loop().create_future()

    async def answered(self, request: Coroutine[Any, Any, T]) -> T:
        """The answer to a request. Raises BusUnavailableError as soon as the connection is lost."""
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
    """A connection that outlives restarts of the server; waits, and says so, until there is one.

    `on_change` is told of each loss (False) and return (True). Leaving flushes what was published.
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
    """Live on a connection, and on the next one when it is given up, until cancelled.

    A life that ends in a BusError is begun again; any other error is ours to die of.
    """
    while True:
        async with connection(url, name, on_change, access) as bus:
            try:
                await live(bus)
            except* BusError as group:
                log.error("starting again on the bus: %s", group.exceptions[0])
        await asyncio.sleep(RETRY_S)


async def until_closed(bus: Bus) -> None:
    """Wait until the client has given the connection up. Raises BusUnavailableError."""
    await bus.closed.wait()
    raise BusUnavailableError(f"connection closed: {bus.client.last_error}")


async def subscribe(bus: Bus, subject: str, queue: str = "") -> Subscription:
    """A core subscription, to iterate. Raises BusUnavailableError."""
    async with translated(subject):
        return await bus.client.subscribe(subject, queue=queue)


_NO_INBOXES = ("kv.", "$")


def is_inbox(subject: str) -> bool:
    """Whether an answer may go there: not to a subject of ours, nor of the server's, where whoever
    may ask us would have us write.
    """
    return bool(subject) and not subject.startswith(_NO_INBOXES)


async def ensure_event_stream(
    js: JetStreamContext, subjects: Subjects, limits: StreamLimits
) -> None:
    """Create the event stream unless it exists; an existing one keeps its limits.

    No maximum age, and new messages are refused when it is full: a rank's history is the only copy
    of its state, and only its writer may shorten it.
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
    """Create the stream of an object store's bucket unless it exists, as every client lays it."""
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
    """The last message of a subject, if there is one. Raises BusUnavailableError."""
    async with translated(subject):
        try:
            return await js.get_last_msg(stream, subject, direct=True)
        except NotFoundError:
            return None


async def count_keys(js: JetStreamContext, subjects: Subjects, keys: str) -> int:
    """How many keys of the bucket match, withdrawn ones included for a day. Raises
    BusUnavailableError.
    """
    async with translated(keys):
        info = await js.stream_info(subjects.bucket_stream, subjects_filter=subjects.key(keys))
    return len(info.state.subjects or ())


@contextmanager
def heeding_cancellation() -> Iterator[None]:
    """Raise CancelledError at the end, if we were cancelled in between.

    The client waits with `asyncio.wait_for`, which until Python 3.12 forgets a cancellation that
    comes together with the answer, and drops others while it closes: whoever is to stop would go
    on for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


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
    """Creating twice is no error on the server, unless the configurations differ."""
    async with translated(name):
        try:
            await create()
        except BadRequestError as error:
            if error.err_code != _OTHER_CONFIGURATION:
                raise


async def _connect(
    url: str, name: str, on_change: Callable[[bool], None], access: NatsAccess
) -> Bus:
    shown, attempts, said = masked(url), count(), ""
    while True:
        bus = Bus(CarefulClient(), asyncio.Event())
        try:
            with heeding_cancellation():
                await _connect_once(bus, url, name, on_change, access)
        except (OSError, NatsError, TimeoutError, ConfigError) as error:
            before, said = said, _why_not(bus, error)
            if next(attempts) % SAID_AGAIN == 0 or said != before:
                log.warning("no NATS at %s yet (%s); trying again", shown, said)
            await asyncio.sleep(RETRY_S)
        else:
            log.info("connected to NATS at %s", shown)
            return bus


def _why_not(bus: Bus, error: Exception) -> str:
    """That no server is available says nothing: there is one, and what is wrong was told before."""
    cause = (isinstance(error, NoServersError) and bus.problem) or error
    return masked(str(cause)) or type(cause).__name__


async def _connect_once(
    bus: Bus, url: str, name: str, on_change: Callable[[bool], None], access: NatsAccess
) -> None:
    shown = masked(url)

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
        # Attempts are limited for the first connection only, so that each failure can be told.
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
    # Closing a connection that is already lost fails on the dead socket, which uvloop calls a
    # RuntimeError.
    with suppress(OSError, RuntimeError):
        await client.close()
    client.abandon()
