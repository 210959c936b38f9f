"""The state of a socket's connection, from its monitor, and the reason why there is none."""

import enum

import zmq
from zmq.utils.monitor import parse_monitor_message

from router.publisher.zmq.wakeups import Wakeups

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_FAILURES = (
    (
        _FAILED | zmq.EVENT_CONNECTED,
        "what listens there is no such socket: is it the HTTP port, or that of events or replays?",
    ),
    (zmq.EVENT_CLOSED, "nothing listens there: is the engine up, with its KV events switched on?"),
    (zmq.EVENT_CONNECT_DELAYED, "the host does not respond: can it be reached from here?"),
)
"""Reasons of a failed connection; the first one with an event that was seen applies."""


class Condition(enum.Enum):
    """The state of a connection."""

    CONNECTING = enum.auto()
    CONNECTED = enum.auto()
    LOST = enum.auto()


class ConnectionMonitor:
    """A monitor of a socket, from before it connects. It must be closed before the socket."""

    def __init__(self, socket: zmq.Socket[bytes], wakeups: Wakeups) -> None:
        self._socket = socket
        self._wakeups = wakeups
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket()
        self._seen = 0
        wakeups.add(self._monitor)
        self.condition = Condition.CONNECTING

    @property
    def failure(self) -> str:
        """The reason why there is no connection."""
        for event, words in _FAILURES:
            if self._seen & event:
                return words
        return "the host's name cannot be resolved here"

    def look(self) -> Condition:
        """Read the monitor's events, and return the current state."""
        while self._wakeups.is_ready(self._monitor):
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._wakeups.drained(self._monitor)
                break
            self._note(parse_monitor_message(frames)["event"])
        return self.condition

    def close(self) -> None:
        """Stop monitoring."""
        self._wakeups.remove(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(0)

    def _note(self, event: int) -> None:
        self._seen |= event
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.condition = Condition.CONNECTED
        elif event & (_LOST | _FAILED):
            self.condition = Condition.LOST
