"""The two sockets to an engine: one that listens to live batches, one that asks for a replay.

A subscription is one connection and never reconnects by itself, because a socket that does hides
from whom a message came. So whatever lies between its making and its loss is of one engine's life.
"""

import enum
from collections.abc import Iterator

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from router.publisher.engine_frames import replay_request

_HIGH_WATER_MARK = 100_000
_MAX_MESSAGE_BYTES = 256 << 20
_HEARTBEAT_MS = 300
_HEARTBEAT_TIMEOUT_MS = 1_000
_HANDSHAKE_MS = 2_000
_RECONNECT_MS = 50
_NEVER = -1
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Condition(enum.Enum):
    """Of a subscription."""

    CONNECTING = enum.auto()
    CONNECTED = enum.auto()
    LOST = enum.auto()


class _Receiver:
    """A socket that is polled once for many messages."""

    def __init__(self, context: zmq.asyncio.Context, kind: int) -> None:
        self.socket = context.socket(kind)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, _HIGH_WATER_MARK)
        self.socket.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self.socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self.socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket)

    def receive(self, max_messages: int) -> Iterator[list[bytes]]:
        """Messages that are there, at most so many; never waits."""
        for _ in range(max_messages):
            try:
                yield self._plain.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return


class Subscription(_Receiver):
    """One connection to an engine's live batches. To be closed."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, topic: str) -> None:
        super().__init__(context, zmq.SUB)
        self.condition = Condition.CONNECTING
        self.socket.set(zmq.RECONNECT_IVL, _NEVER)
        self.monitor = self.socket.get_monitor_socket()
        self._plain_monitor: zmq.Socket[bytes] = zmq.Socket.shadow(self.monitor)
        self.socket.subscribe(topic)
        self.socket.connect(endpoint)

    def look(self) -> Condition:
        """The condition, as of now."""
        while self._plain_monitor.poll(0):
            frames = self._plain_monitor.recv_multipart(zmq.NOBLOCK)
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.condition = Condition.CONNECTED
            elif event & (_LOST | _FAILED):
                self.condition = Condition.LOST
        return self.condition

    def close(self) -> None:
        """Drop the connection and whatever was not received yet."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class ReplayCall(_Receiver):
    """One replay, asked for once, as soon as there is a connection. To be closed."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, first: int) -> None:
        super().__init__(context, zmq.DEALER)
        self.socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self.socket.connect(endpoint)
        self._plain.send_multipart(replay_request(first), zmq.NOBLOCK)

    def close(self) -> None:
        """Give up what was not received yet."""
        self.socket.close(0)
