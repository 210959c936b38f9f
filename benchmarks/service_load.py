"""A load generator: requests made beforehand, over many connections, from one thread.

Each connection has one request on its way; `concurrency` of them are open. Nothing is parsed of an
answer but its status and its length.
"""

import math
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from itertools import cycle

from msgspec import Struct

HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length: "
CHUNK_BYTES = 1 << 16
PATIENCE_S = 60.0


class Load(Struct, frozen=True):
    """What a round of requests came to. `processor_s`: of the server."""

    seconds: float
    latencies_s: list[float]
    failures: list[bytes]
    processor_s: float = 0.0

    @property
    def processor_s_each(self) -> float:
        """Of the server's core."""
        return self.processor_s / len(self.latencies_s)

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.seconds

    @property
    def p99_s(self) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]


def request(path: str, body: bytes, content_type: str, method: str = "POST") -> bytes:
    """A request as it goes over the wire."""
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def run_load(
    port: int, requests: Sequence[bytes], concurrency: int, count: int, per_s: float = math.inf
) -> Load:
    """Send so many requests, in turn; at most so many a second, evenly spaced, where that is told.

    Where it is, a request that had to wait for a connection has waited since its time.
    """
    generator = _Generator(port, requests, concurrency)
    try:
        return generator.run(count, per_s)
    finally:
        generator.close()


class _Connection:
    __slots__ = ("_answer", "_rest", "_whole_bytes", "socket", "started_s")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._answer = b""
        self._whole_bytes = 0
        self._rest = memoryview(b"")
        self.started_s = 0.0

    def send(self, request: bytes, started_s: float) -> bool:
        """Whether all of it went out."""
        self.started_s = started_s
        self._answer, self._whole_bytes = b"", 0
        self._rest = memoryview(request)
        return self.send_rest()

    def send_rest(self) -> bool:
        try:
            self._rest = self._rest[self.socket.send(self._rest) :]
        except BlockingIOError:
            return False
        return not self._rest

    def receive(self) -> bytes | None:
        """The answer, once it is whole."""
        got = self.socket.recv(CHUNK_BYTES)
        if not got:
            raise ConnectionError("the server closed a connection")
        self._answer = got if not self._answer else self._answer + got
        if not self._whole_bytes:
            end = self._answer.find(HEAD_END)
            if end < 0:
                return None
            start = self._answer.index(LENGTH) + len(LENGTH)
            length_bytes = int(self._answer[start : self._answer.index(b"\r", start)])
            self._whole_bytes = end + len(HEAD_END) + length_bytes
        return self._answer if len(self._answer) >= self._whole_bytes else None


class _Generator:
    def __init__(self, port: int, requests: Sequence[bytes], concurrency: int) -> None:
        self._requests = cycle(requests)
        connections = [_Connection(port) for _ in range(concurrency)]
        self._connections = {each.socket.fileno(): each for each in connections}
        self._free = deque(connections)  # in turn: one that idles for long is closed by its server
        self._poll = select.epoll()
        for number in self._connections:
            self._poll.register(number, select.EPOLLIN)
        self._latencies_s: list[float] = []
        self._failures: list[bytes] = []

    def run(self, count: int, per_s: float) -> Load:
        start_s = time.perf_counter()
        for sent in range(count):
            due_s = start_s + sent / per_s if per_s < math.inf else 0.0
            while (due_s and time.perf_counter() < due_s) or not self._free:
                # A poll ends a millisecond late at most: the last one before it is due goes round.
                left_s = max(0.0, due_s - time.perf_counter() - 0.001)
                self._receive(left_s if self._free else PATIENCE_S)
            self._send(self._free.popleft(), due_s or time.perf_counter())
        while len(self._latencies_s) < count:
            self._receive(PATIENCE_S)
        return Load(time.perf_counter() - start_s, self._latencies_s, self._failures)

    def close(self) -> None:
        self._poll.close()
        for each in self._connections.values():
            each.socket.close()

    def _send(self, connection: _Connection, started_s: float) -> None:
        if not connection.send(next(self._requests), started_s):
            self._poll.modify(connection.socket.fileno(), select.EPOLLOUT)

    def _receive(self, timeout_s: float) -> None:
        events = self._poll.poll(timeout_s)
        if not events and timeout_s == PATIENCE_S:
            raise TimeoutError("a server does not answer")
        for number, event in events:
            connection = self._connections[number]
            if event & select.EPOLLOUT:
                if connection.send_rest():
                    self._poll.modify(number, select.EPOLLIN)
            elif (answer := connection.receive()) is not None:
                self._latencies_s.append(time.perf_counter() - connection.started_s)
                if not answer.startswith(b"HTTP/1.1 2"):
                    self._failures.append(answer)
                self._free.append(connection)
