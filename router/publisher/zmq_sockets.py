"""The two sockets to an engine: one that listens to live batches, one that asks for replays.

A subscription is one connection and never reconnects by itself, because a socket that does hides
from whom a message came. So whatever lies between its making and its loss is of one engine's life.
A replay's connection serves for the next one too, if the last was answered to the end.
"""

from collections.abc import Iterator
from typing import TypeAlias

import zmq

from router.publisher.engine_frames import replay_request
from router.publisher.zmq_wakeups import Wakeups
from router.publisher.zmq_watch import Condition, ConnectionWatch

MAX_LOT_MESSAGES = 256
MAX_LOT_BYTES = 256 << 10
"""So much is taken at once from a socket; others run before the next."""

_HIGH_WATER_MARK = 100_000
_MAX_MESSAGE_BYTES = 256 << 20
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 6_000
"""So long a host that vanished keeps its connection; that it is silent, probes find out before."""

_HANDSHAKE_MS = 2_000
_RECONNECT_MS = 50
_NEVER_MS = 1 << 29
"""Days. With -1, ZMQ drops what came and is unread when a connection is lost; and ends the process
(`Assertion failed: !_more`) if it hears of the loss between two frames of a message."""

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


class Receiver:
    """A socket that wakes its task, and is then read until it is empty, or a lot is full. To be
    closed.
    """

    def __init__(self, context: Context, kind: int, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self.socket: zmq.Socket[bytes] = zmq.Socket(context, kind)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, _HIGH_WATER_MARK)
        self.socket.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self.socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        wakeups.add(self.socket)

    def connect(self, endpoint: str) -> None:
        """Begin to connect."""
        self.socket.connect(endpoint)
        self._wakeups.look(self.socket)

    def receive(self) -> Iterator[list[bytes]]:
        """Messages that are there, a lot of them at most; never waits."""
        if not self._wakeups.is_ready(self.socket):
            return
        lot_bytes = 0
        for _ in range(MAX_LOT_MESSAGES):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._wakeups.drained(self.socket)
                return
            lot_bytes += len(frames[-1])
            yield frames
            if lot_bytes > MAX_LOT_BYTES:
                break
        self._wakeups.wake()

    @property
    def is_drained(self) -> bool:
        """Was all received that had come by the last `receive`?"""
        return not self._wakeups.is_ready(self.socket)

    def close(self) -> None:
        """Drop the connection and whatever was not received yet."""
        self._wakeups.remove(self.socket)
        self.socket.close(0)


class Subscription(Receiver):
    """One connection to an engine's live batches. To be closed."""

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
        self.watch = ConnectionWatch(self.socket, wakeups)
        self.socket.subscribe(topic)
        self.connect(endpoint)

    def close(self) -> None:
        """Drop the connection and whatever was not received yet."""
        self.watch.close()
        super().close()


class ReplayCalls(Receiver):
    """A connection for replays, one after the other. To be closed, above all after one that was
    not answered to its end: what is still to come of it would be taken for the next one's.
    """

    def __init__(self, context: Context, endpoint: str, wakeups: Wakeups) -> None:
        super().__init__(context, zmq.DEALER, wakeups)
        self.socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._watch: ConnectionWatch | None = ConnectionWatch(self.socket, wakeups)
        self.connect(endpoint)

    @property
    def failure(self) -> str:
        """Why an answer may not have come."""
        if self._watch is None or self._watch.look() is Condition.CONNECTED:
            return "it does not answer: is it the engine's replay endpoint?"
        return self._watch.failure

    def answered(self) -> None:
        """It is what it should be: no need to watch it any more."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def ask(self, first: int) -> None:
        """Ask for what was published from `first` on, as soon as there is a connection."""
        self.socket.send_multipart(replay_request(first), zmq.NOBLOCK)
        self._wakeups.look(self.socket)

    def close(self) -> None:
        """Give up what was not received yet."""
        self.answered()
        super().close()
