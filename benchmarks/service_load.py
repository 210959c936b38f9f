"""A load generator: scripts of requests made beforehand, over many connections, from one thread.

A script is what one caller asks one after the other, for example a booking, its first token and
its end. Each connection carries one script at a time; `concurrency` of them are open. While the
clock runs nothing is parsed of an answer but its status and its length.
"""

import math
import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TypeAlias

from msgspec import Struct

HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length: "
BUFFER_BYTES = 1 << 20
PATIENCE_S = 60.0

Segments: TypeAlias = tuple[bytes, ...]
"""A request; each segment is given to the kernel by a call of its own."""

Script: TypeAlias = tuple[Segments, ...]


class Refusal(Struct, frozen=True):
    """An answer that is no success, and how long it took."""

    answer: bytes
    latency_s: float


class Load(Struct, frozen=True, kw_only=True):
    """What a round of scripts came to. `processor_s`: of the server.

    `latencies_s`: of the answers that are successes, by the step of the script. `kept`: answers to
    first steps with the numbers of their scripts.
    """

    seconds: float
    latencies_s: list[list[float]]
    refusals: list[Refusal] = []
    kept: list[tuple[int, bytes]] = []
    processor_s: float = 0.0

    @property
    def scripts(self) -> int:
        """How many were answered to their end."""
        return len(self.latencies_s[-1])

    @property
    def processor_s_each(self) -> float:
        """Of the server's core, for each script."""
        return self.processor_s / self.scripts

    @property
    def per_s(self) -> float:
        return self.scripts / self.seconds

    def p50_s(self, step: int = 0) -> float:
        return median(self.latencies_s[step])

    def p99_s(self, step: int = 0) -> float:
        return percentile(self.latencies_s[step], 0.99)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def request(
    path: str, body: bytes, content_type: str, method: str = "POST", headers: str = ""
) -> bytes:
    """A request as it goes over the wire. `headers`: further lines, each with its end."""
    return request_head(path, len(body), content_type, method, headers) + body


def request_head(
    path: str, body_bytes: int, content_type: str, method: str = "POST", headers: str = ""
) -> bytes:
    """Its head alone."""
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-type: {content_type}\r\n"
        f"content-length: {body_bytes}\r\n\r\n"
    ).encode()


def bare_request(method: str, path: str, headers: str = "") -> bytes:
    """A request without a body."""
    length = "content-length: 0\r\n" if method == "POST" else ""
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{headers}{length}\r\n".encode()


def repeated(requests: Sequence[bytes], count: int) -> list[Script]:
    """Scripts of one request each, in turn."""
    return [((requests[number % len(requests)],),) for number in range(count)]


def run_load(
    port: int,
    scripts: Sequence[Script],
    concurrency: int,
    *,
    per_s: float = math.inf,
    keep_every: int = 0,
) -> Load:
    """Run scripts, in turn; at most so many a second, evenly spaced, where that is told.

    Where it is, a script that had to wait for a connection has waited since its time. Of every
    `keep_every`th the first answer is kept.
    """
    generator = Generator(port, scripts, concurrency, keep_every)
    try:
        return generator.run(per_s)
    finally:
        generator.close()


class Connection:
    """One script at a time: requests out, whole answers in."""

    __slots__ = (
        "_answer",
        "_rest",
        "_whole_bytes",
        "number",
        "recv_into",
        "script",
        "send_bytes",
        "socket",
        "started_s",
        "step",
    )

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.send_bytes, self.recv_into = self.socket.send, self.socket.recv_into
        self._answer = b""
        self._whole_bytes = 0
        self._rest = deque[memoryview]()
        self.script: Script = ()
        self.number = self.step = 0
        self.started_s = 0.0

    def send(self, segments: Segments, started_s: float) -> bool:
        """Whether all of it went out."""
        self.started_s = started_s
        for position, segment in enumerate(segments):
            try:
                sent = self.send_bytes(segment)
            except BlockingIOError:
                sent = 0
            if sent < len(segment):
                self._rest.append(memoryview(segment)[sent:])
                self._rest.extend(map(memoryview, segments[position + 1 :]))
                return self.send_rest()
        return True

    def send_rest(self) -> bool:
        try:
            while self._rest:
                sent = self.send_bytes(self._rest[0])
                if sent < len(self._rest[0]):
                    self._rest[0] = self._rest[0][sent:]
                    return False
                self._rest.popleft()
        except BlockingIOError:
            return False
        return True

    def receive(self, buffer: bytearray) -> bytes | None:
        """The answer, once it is whole."""
        got = self.recv_into(buffer)
        if not got:
            raise ConnectionError("the server closed a connection")
        if not self._answer:
            answer = bytes(memoryview(buffer)[:got])
        else:
            answer = self._answer + buffer[:got]
        if not self._whole_bytes:
            end = answer.find(HEAD_END)
            if end < 0:
                self._answer = answer
                return None
            start = answer.index(LENGTH, 0, end) + len(LENGTH)
            length_bytes = int(answer[start : answer.index(b"\r", start)])
            self._whole_bytes = end + len(HEAD_END) + length_bytes
        if len(answer) < self._whole_bytes:
            self._answer = answer
            return None
        self._answer, self._whole_bytes = b"", 0
        return answer


class Generator:
    """Connections, and the scripts that they carry."""

    def __init__(
        self, port: int, scripts: Sequence[Script], concurrency: int, keep_every: int = 0
    ) -> None:
        self._scripts: Iterator[tuple[int, Script]] = enumerate(scripts)
        self._count = len(scripts)
        self._keep_every = keep_every
        self._connections: dict[int, Connection] = {}
        self._poll = select.epoll()
        # In turn: one that idles for long is closed by its server.
        self._free = deque(Connection(port) for _ in range(concurrency))
        for each in self._free:
            self.add(each)
        self._buffer = bytearray(BUFFER_BYTES)
        self._latencies_s: list[list[float]] = [[] for _ in range(max(map(len, scripts)))]
        self._ended = 0
        self._refusals: list[Refusal] = []
        self._kept: list[tuple[int, bytes]] = []

    def run(self, per_s: float = math.inf) -> Load:
        start_s = time.perf_counter()
        for begun in range(self._count):
            due_s = start_s + begun / per_s if per_s < math.inf else 0.0
            while (due_s and time.perf_counter() < due_s) or not self._free:
                # A poll ends a millisecond late at most: the last one before it is due goes round.
                left_s = max(0.0, due_s - time.perf_counter() - 0.001)
                self.receive(left_s if self._free else PATIENCE_S)
            self.begin(self._free.popleft(), due_s or time.perf_counter())
        while self._ended < self._count:
            self.receive(PATIENCE_S)
        return Load(
            seconds=time.perf_counter() - start_s,
            latencies_s=self._latencies_s,
            refusals=self._refusals,
            kept=self._kept,
        )

    def add(self, connection: Connection) -> None:
        """Receive what comes over a connection."""
        self._connections[connection.socket.fileno()] = connection
        self._poll.register(connection.socket.fileno(), select.EPOLLIN)

    def close(self) -> None:
        self._poll.close()
        for each in self._connections.values():
            each.socket.close()

    def begin(self, connection: Connection, started_s: float) -> None:
        """The next script, on a connection that is free."""
        connection.number, connection.script = next(self._scripts)
        connection.step = 0
        self.send(connection, started_s)

    def receive(self, timeout_s: float) -> None:
        """Whatever has come; go on with the scripts that it belongs to."""
        events = self._poll.poll(timeout_s)
        if not events and timeout_s == PATIENCE_S:
            raise TimeoutError("a server does not answer")
        for number, event in events:
            connection = self._connections[number]
            if event & select.EPOLLOUT:
                if connection.send_rest():
                    self._poll.modify(number, select.EPOLLIN)
            elif (answer := connection.receive(self._buffer)) is not None:
                self.answered(connection, answer, time.perf_counter())

    def answered(self, connection: Connection, answer: bytes, now_s: float) -> None:
        """Count an answer, and send what comes after it; a refusal ends its script."""
        step, latency_s = connection.step, now_s - connection.started_s
        if not answer.startswith(b"HTTP/1.1 2"):
            self._refusals.append(Refusal(answer, latency_s))
            self.ended(connection)
            return
        self._latencies_s[step].append(latency_s)
        if not step and self._keep_every and not connection.number % self._keep_every:
            self._kept.append((connection.number, answer))
        connection.step = step + 1
        if connection.step < len(connection.script):
            self.send(connection, now_s)
        else:
            self.ended(connection)

    def ended(self, connection: Connection) -> None:
        """A script is over; its connection can carry another."""
        self._ended += 1
        self._free.append(connection)

    def send(self, connection: Connection, started_s: float) -> None:
        """The request that is next in its script."""
        if not connection.send(connection.script[connection.step], started_s):
            self._poll.modify(connection.socket.fileno(), select.EPOLLOUT)
