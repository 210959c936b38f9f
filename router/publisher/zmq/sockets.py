"""The ZMQ sockets to an engine: live batches, replays, and SGLang's loads.

The two sockets to an engine: a subscription to live batches, and one for replays.

A subscription is one connection and never reconnects by itself, because that would hide which
process sent a message. So all its messages are of one engine's life. A replay's connection is used
for the next one too, if the last one was complete.
"""

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import zmq

from router.publisher.batch_order.frames import replay_request
from router.publisher.engine_metrics.loads import TOPIC, EngineLoads
from router.publisher.zmq.connection_monitor import Condition, ConnectionMonitor
from router.publisher.zmq.wakeups import Wakeups

MAX_LOT_MESSAGES = 256
MAX_LOT_BYTES = 256 << 10
"""The limit of a lot read at once from a socket; other tasks run before the next lot."""

MOST_WAITING_BYTES = 64 << 20
"""The limit of messages of one socket of an engine that were received and not read: 12 million
tokens. Beyond it, the engine is connected again, and what was dropped is replayed."""

_FETCHED_MESSAGES = 16 * MAX_LOT_MESSAGES
"""The limit of messages that are fetched from ZMQ at once, to count their bytes."""

_HIGH_WATER_MARK = 100_000
_MAX_FRAME_BYTES = MOST_WAITING_BYTES // 2
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 6_000
"""The time after which the connection to a vanished host is closed; probes detect its silence
earlier."""

_HANDSHAKE_MS = 2_000
_RECONNECT_MS = 50
_NEVER_MS = 1 << 29
"""An interval of days. With -1, ZMQ drops unread messages when a connection is lost, and it aborts
the process (`Assertion failed: !_more`) if the loss occurs between two frames of a message."""

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


class Receiver:
    """A socket that only receives, with a limit on the bytes that wait. It must be closed.

    ZMQ limits the number of messages that wait, but not their bytes. So they are fetched from it
    sooner than they are read, and counted here. At the limit, the connection is dropped with what
    ZMQ still has; fetched messages can be read. `is_overflowing`: the limit was reached.
    """

    def __init__(self, context: Context, kind: int, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._waiting: deque[list[bytes]] = deque()
        self._waiting_bytes = 0
        self.is_overflowing = False
        self.socket: zmq.Socket[bytes] = zmq.Socket(context, kind)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, _HIGH_WATER_MARK)
        self.socket.set(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self.socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        wakeups.add(self.socket)

    def connect(self, endpoint: str) -> None:
        """Start to connect."""
        self.socket.connect(endpoint)
        self._wakeups.look(self.socket)

    def receive(self) -> Iterator[list[bytes]]:
        """Yield the messages that are present, at most a lot of them; never waits."""
        self._fetch()
        lot_bytes = 0
        for _ in range(min(len(self._waiting), MAX_LOT_MESSAGES)):
            frames = self._waiting.popleft()
            size_bytes = sum(map(len, frames))
            self._waiting_bytes -= size_bytes
            lot_bytes += size_bytes
            yield frames
            if lot_bytes > MAX_LOT_BYTES:
                break
        if self._waiting:
            self._wakeups.wake()

    def _fetch(self) -> None:
        """Take messages from ZMQ, up to the limits."""
        if self.is_overflowing or not self._wakeups.is_ready(self.socket):
            return
        for _ in range(_FETCHED_MESSAGES):
            if self._waiting_bytes >= MOST_WAITING_BYTES:
                self._overflow()
                break
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._wakeups.drained(self.socket)
                return
            self._waiting.append(frames)
            self._waiting_bytes += sum(map(len, frames))
        self._wakeups.wake()

    def _overflow(self) -> None:
        self.is_overflowing = True
        self._drop_connection()

    @property
    def is_drained(self) -> bool:
        """True if the last `receive` read all messages that had arrived."""
        return not self._waiting and not self._wakeups.is_ready(self.socket)

    @property
    def is_cut_off(self) -> bool:
        """True if the limit was reached, and all that had been fetched until then is read."""
        return self.is_overflowing and not self._waiting

    def close(self) -> None:
        """Drop the connection and all unread messages."""
        self._waiting.clear()
        self._drop_connection()

    def _drop_connection(self) -> None:
        if not self.socket.closed:
            self._wakeups.remove(self.socket)
            self.socket.close(0)


class Subscription(Receiver):
    """One connection to an engine's live batches. It must be closed."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        topic: str,
        wakeups: Wakeups,
    ) -> None:
        super().__init__(context, zmq.SUB, wakeups)
        self.socket.set(zmq.RECONNECT_IVL, _NEVER_MS)
        self.socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self.watch = ConnectionMonitor(self.socket, wakeups)
        self.socket.subscribe(topic)
        self.connect(endpoint)

    def _drop_connection(self) -> None:
        if not self.socket.closed:
            self.watch.close()
        super()._drop_connection()


class ReplayCalls(Receiver):
    """A connection for replays, one after the other.

    It must be closed after an incomplete replay: the remaining messages would be taken for those of
    the next one.
    """

    def __init__(self, context: Context, endpoint: str, wakeups: Wakeups) -> None:
        super().__init__(context, zmq.DEALER, wakeups)
        self.socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._watch: ConnectionMonitor | None = ConnectionMonitor(self.socket, wakeups)
        self.connect(endpoint)

    @property
    def failure(self) -> str:
        """The probable reason why no response arrived."""
        if self._watch is None or self._watch.look() is Condition.CONNECTED:
            return "it does not respond: is it the engine's replay endpoint?"
        return self._watch.failure

    def answered(self) -> None:
        """Stop monitoring the connection, which has proven to be a replay endpoint."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def request(self, first: int) -> None:
        """Request all batches from `first` on, as soon as there is a connection."""
        self.socket.send_multipart(replay_request(first), zmq.NOBLOCK)
        self._wakeups.look(self.socket)

    def _drop_connection(self) -> None:
        self.answered()
        super()._drop_connection()


log = logging.getLogger(__name__)

_SOCKETS_PER_ENGINE = 7
"""Sockets for events, replays and load, and a pair for each monitored connection."""

_FILES_PER_ENGINE = 10
"""One for each socket, and one for each connection."""

_OTHER_FILES = 256


def open_context(max_engines: int) -> Context:
    """Open a context for `max_engines` followers, with one thread; it must be closed.

    Raises this process's limit on open files as far as needed and allowed. If it remains too
    low, that is logged, and connections beyond it fail one at a time.
    """
    context: Context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, _SOCKETS_PER_ENGINE * max_engines + _SOCKETS_PER_ENGINE)
    allowed = _raise_file_limit(_FILES_PER_ENGINE * max_engines + _OTHER_FILES)
    fitting = max((allowed - _OTHER_FILES) // _FILES_PER_ENGINE, 0)
    if fitting < max_engines:
        log.warning(
            "%d open files are allowed, enough for %d engines of %d: raise `ulimit -Hn`",
            allowed,
            fitting,
            max_engines,
        )
    return context


def _raise_file_limit(wanted: int) -> int:
    """Raise the limit on open files up to `wanted`, if allowed. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, wanted)
    allowed = min(max(soft, wanted), hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


_LOOK_S = 10.0


async def listen_to_loads(
    context: Context,
    endpoint: str,
    loads: EngineLoads,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Receive reports until cancelled.

    A lost report is superseded by the next, so the socket may reconnect by itself. An engine that
    sends more than is read is connected again.
    """
    while True:
        wakeups = Wakeups()
        receiver = Receiver(context, zmq.SUB, wakeups)
        try:
            receiver.socket.subscribe(TOPIC)
            receiver.connect(endpoint)
            while not receiver.is_cut_off:
                await wakeups.wait(_LOOK_S)
                for frames in receiver.receive():
                    loads.record(frames, clock())
        finally:
            receiver.close()
