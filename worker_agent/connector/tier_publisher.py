"""The publisher of tier contents to the agent beside the engine; see `tier_wire.py`.

engine's worker ──changes──▶ inventory ──▶ a queue for each reader ──▶ a thread each ──▶ socket
"""

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from secrets import randbits
from threading import Condition, Event, Lock, Thread

from router.protocol.values import Identity
from router.publisher.feed.tier_wire import PART_BLOCKS, VERSION, Held, Hello, TierEvents, encode
from worker_agent.connector.slots.tier_inventory import TierInventory
from worker_agent.sharing.accepting import accept_until, hang_up, local_listener, tcp_listener
from worker_agent.sharing.errors import PeerError
from worker_agent.tiers.stack import TierChange

log = logging.getLogger(__name__)

BEAT_S = 0.2
"""Interval of the message that there are no changes."""
SEND_S = 10.0
"""Time limit for sending a message to a reader."""
MAX_READERS = 8
MAX_QUEUED_BYTES = 64 << 20
"""Queue limit of a reader; beyond it, the reader is disconnected and has to start anew."""

_BEAT = encode(TierEvents([], is_all=True))


class TierPublisher:
    """The tier events of one rank. Publishing never waits for a reader; after `close` it ends."""

    __slots__ = ("_closed", "_hello", "_inventory", "_listener", "_lock", "_readers",
                 "_thread", "dropped_readers", "not_accepted")  # fmt: skip

    def __init__(self, address: str, identity: Identity, dp_rank: int) -> None:
        """Listen on an address. Raises PeerError.

        `address`: `tcp://host:port`, with port 0 for any free port, or `ipc:///path`.
        """
        self._hello = encode(Hello(VERSION, identity, dp_rank))
        self._inventory = TierInventory(randbits(64) | 1)
        self._lock = Lock()
        self._readers: set[_Reader] = set()
        self._closed = Event()
        self.dropped_readers = 0
        """Readers disconnected as too slow, and connections beyond `MAX_READERS`."""
        self.not_accepted = 0
        """Connections that failed before a thread served them."""
        self._listener = _listener(address)
        self._thread = Thread(target=self._accept, name="tier-news", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Address in the form that readers use."""
        name = self._listener.getsockname()
        if self._listener.family == socket.AF_UNIX:
            return f"ipc://{name}"
        return f"tcp://{name[0]}:{name[1]}"

    def publish(self, changes: Sequence[TierChange]) -> None:
        """Publish changes of the tiers, in order. O(blocks), and O(readers) for each message."""
        for first in range(0, len(changes), PART_BLOCKS):
            some = [(each.tier, each.change) for each in changes[first : first + PART_BLOCKS]]
            with self._lock:
                if events := self._inventory.apply(some):
                    self._publish_all(encode(TierEvents(events, is_all=False)))

    def close(self) -> None:
        """Close all connections and wait for the threads; calling it again has no effect."""
        with self._lock:
            self._closed.set()
            readers = list(self._readers)
        hang_up(self._listener)
        self._listener.close()
        for reader in readers:
            reader.close()
        for thread in [self._thread, *(reader.thread for reader in readers)]:
            thread.join(SEND_S)

    def _publish_all(self, message: bytes) -> None:
        for reader in self._readers:
            if not reader.add(message):
                self.dropped_readers += 1

    def _accept(self) -> None:
        accept_until(self._closed, self._listener, self._welcome, self._note_failure)

    def _note_failure(self) -> None:
        self.not_accepted += 1

    def _welcome(self, connected: socket.socket) -> None:
        """Start a reader with the present contents, followed by every later change."""
        with self._lock:
            if self._closed.is_set() or len(self._readers) >= MAX_READERS:
                self.dropped_readers += 1
                connected.close()
                return
            reader = _Reader(connected, self._hello, self._inventory.held(), self._forget)
            reader.thread.start()  # may fail; it leaves the set under this lock
            self._readers.add(reader)

    def _forget(self, reader: "_Reader") -> None:
        with self._lock:
            self._readers.discard(reader)


class _Reader:
    """One connection, and the thread that writes to it."""

    __slots__ = (
        "_changed",
        "_connected",
        "_held",
        "_hello",
        "_is_caught_up",
        "_is_over",
        "_on_end",
        "_queue",
        "_queued_bytes",
        "thread",
    )  # fmt: skip

    def __init__(
        self,
        connected: socket.socket,
        hello: bytes,
        held: Iterator[Held],
        on_end: "Callable[[_Reader], None]",
    ) -> None:
        connected.settimeout(SEND_S)
        self._connected = connected
        self._hello = hello
        self._held = held
        self._on_end = on_end
        self._changed = Condition()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._is_caught_up = False
        """True if the reader has received `is_all` after the last message."""
        self._is_over = False
        self.thread = Thread(target=self._run, name="tier-news-reader", daemon=True)

    def add(self, message: bytes) -> bool:
        """Queue a message. Returns False if the queue is full; the reader is then disconnected."""
        with self._changed:
            if self._is_over:
                return True
            if self._queued_bytes + len(message) > MAX_QUEUED_BYTES:
                self._end()
                return False
            self._queue.append(message)
            self._queued_bytes += len(message)
            self._changed.notify()
            return True

    def close(self) -> None:
        """Close the connection."""
        with self._changed:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._changed.notify()
        hang_up(self._connected)

    def _run(self) -> None:
        try:
            self._connected.sendall(self._hello)
            for part in self._held:
                self._connected.sendall(encode(part))
            while (messages := self._next()) is not None:
                for message in messages:
                    self._connected.sendall(message)
        except OSError as error:
            log.info("tier event reader disconnected: %s", error)
        finally:
            self._on_end(self)
            self._connected.close()

    def _next(self) -> list[bytes] | None:
        """Return the messages to send, the beat if there are none, or None after the end."""
        with self._changed:
            if not self._queue and self._is_caught_up:
                self._changed.wait_for(lambda: self._queue or self._is_over, BEAT_S)
            if self._is_over:
                return None
            messages = list(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            self._is_caught_up = not messages
            return messages or [_BEAT]


def _listener(address: str) -> socket.socket:
    """Return a listener on an address. Raises PeerError."""
    kind, _, place = address.partition("://")
    if kind == "ipc":
        return local_listener(Path(place))
    host, _, port = place.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal():
        raise PeerError(address, "neither tcp://host:port nor ipc:///path")
    return tcp_listener(host.strip("[]"), int(port))
