"""Tells the agent beside the engine what the tiers hold: `router/publisher/tier_wire.py`.

engine's worker ──tell──▶ inventory ──▶ a queue for each reader ──▶ a thread each ──▶ socket
"""

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import randbits
from threading import Condition, Lock, Thread

from router.blockset_errors import PeerError
from router.protocol.values import Identity
from router.publisher.tier_wire import PART_BLOCKS, VERSION, Held, Hello, News, encode
from worker_agent.connector.tier_inventory import TierInventory
from worker_agent.tiers.stack import TierChange
from worker_agent.transfer.peer_listening import local_listener, tcp_listener

log = logging.getLogger(__name__)

BEAT_S = 0.2
"""So often it is said that there is nothing new."""
SEND_S = 10.0
"""So long a reader may take for a message."""
MAX_READERS = 8
MAX_QUEUED_BYTES = 64 << 20
"""Of one reader; beyond, it has to connect anew, and is told everything."""

_BEAT = encode(News([], is_all=True))


class TierNews:
    """One rank's. `tell` never waits for a reader. Closed, it tells nobody anything any more."""

    __slots__ = ("_hello", "_inventory", "_is_closed", "_listener", "_lock", "_readers",
                 "_thread", "dropped_readers")  # fmt: skip

    def __init__(self, address: str, identity: Identity, dp_rank: int) -> None:
        """`address`: tcp://host:port, where port 0 is any, or ipc:///path. Raises PeerError."""
        self._hello = encode(Hello(VERSION, identity, dp_rank))
        self._inventory = TierInventory(randbits(64) | 1)
        self._lock = Lock()
        self._readers: set[_Reader] = set()
        self._is_closed = False
        self.dropped_readers = 0
        """Were too slow, or one too many."""
        self._listener = _listener(address)
        self._thread = Thread(target=self._accept, name="tier-news", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """As readers write it."""
        name = self._listener.getsockname()
        if self._listener.family == socket.AF_UNIX:
            return f"ipc://{name}"
        return f"tcp://{name[0]}:{name[1]}"

    def tell(self, changes: Sequence[TierChange]) -> None:
        """What happened in the tiers, in order. O(blocks), and O(readers) for each message."""
        for first in range(0, len(changes), PART_BLOCKS):
            some = [(each.tier, each.change) for each in changes[first : first + PART_BLOCKS]]
            with self._lock:
                if events := self._inventory.apply(some):
                    self._tell_all(encode(News(events, is_all=False)))

    def close(self) -> None:
        """Hang up, and wait for the threads; again is nothing."""
        with self._lock:
            self._is_closed = True
            readers = list(self._readers)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for reader in readers:
            reader.close()
        for thread in [self._thread, *(reader.thread for reader in readers)]:
            thread.join(SEND_S)

    def _tell_all(self, message: bytes) -> None:
        for reader in self._readers:
            if not reader.add(message):
                self.dropped_readers += 1

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            self._welcome(connected)

    def _welcome(self, connected: socket.socket) -> None:
        """What is held as of now, and every change since."""
        with self._lock:
            if self._is_closed or len(self._readers) >= MAX_READERS:
                self.dropped_readers += 1
                connected.close()
                return
            reader = _Reader(connected, self._hello, self._inventory.held(), self._forget)
            self._readers.add(reader)
            reader.thread.start()

    def _forget(self, reader: "_Reader") -> None:
        with self._lock:
            self._readers.discard(reader)


class _Reader:
    """One connection, and the thread that writes to it."""

    __slots__ = (
        "_connected",
        "_held",
        "_hello",
        "_is_caught_up",
        "_is_over",
        "_news",
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
        self._news = Condition()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._is_caught_up = False
        """Was it told that there is no more, after the last message?"""
        self._is_over = False
        self.thread = Thread(target=self._run, name="tier-news-reader", daemon=True)

    def add(self, message: bytes) -> bool:
        """Send this, too; False if it is too slow for that, and hung up on."""
        with self._news:
            if self._is_over:
                return True
            if self._queued_bytes + len(message) > MAX_QUEUED_BYTES:
                self._end()
                return False
            self._queue.append(message)
            self._queued_bytes += len(message)
            self._news.notify()
            return True

    def close(self) -> None:
        """Hang up."""
        with self._news:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._news.notify()
        with suppress(OSError):
            self._connected.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._connected.sendall(self._hello)
            for part in self._held:
                self._connected.sendall(encode(part))
            while (messages := self._next()) is not None:
                for message in messages:
                    self._connected.sendall(message)
        except OSError as error:
            log.info("a reader of tier news is gone: %s", error)
        finally:
            self._on_end(self)
            self._connected.close()

    def _next(self) -> list[bytes] | None:
        """What is to be sent; the beat alone where there is nothing, None where it is over."""
        with self._news:
            if not self._queue and self._is_caught_up:
                self._news.wait_for(lambda: self._queue or self._is_over, BEAT_S)
            if self._is_over:
                return None
            messages = list(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            self._is_caught_up = not messages
            return messages or [_BEAT]


def _listener(address: str) -> socket.socket:
    """Raises PeerError."""
    kind, _, place = address.partition("://")
    if kind == "ipc":
        return local_listener(Path(place))
    host, _, port = place.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal():
        raise PeerError(address, "neither tcp://host:port nor ipc:///path")
    return tcp_listener(host.strip("[]"), int(port))
