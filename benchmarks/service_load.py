"""A load generator: scripts of requests made beforehand, over many connections, from one thread.

A script is what one caller asks one after the other, for example a booking, its first token and
its end. Each connection carries one script at a time; `concurrency` of them are open. While the
clock runs nothing is parsed of an answer but its status and its length.
"""

import math
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TypeAlias

from msgspec import Struct

HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length: "
BUFFER_BYTES = 1 << 20
NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
PATIENCE_S = 60.0
NATS_HELLO = 'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
NATS_INBOX = "_INBOX.cycle."

Segments: TypeAlias = tuple[bytes, ...]
"""A request; each segment is given to the kernel by a call of its own."""

Script: TypeAlias = tuple[Segments, ...]

NatsMessage: TypeAlias = tuple[int, bytes, bytes]
"""The number of its script, its head and its body."""


class Address(Struct, frozen=True):
    """Where a server listens on this machine. `authorities`: a PEM file, for TLS."""

    port: int
    authorities: str = ""


class Refusal(Struct, frozen=True):
    """An answer that is no success to a step of a script, and how long it took."""

    answer: bytes
    step: int
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
    addresses: Sequence[Address],
    scripts: Sequence[Script],
    concurrency: int,
    *,
    per_s: float = math.inf,
    keep_every: int = 0,
) -> Load:
    """Run scripts, in turn; at most `per_s` a second, evenly spaced, if that is given.

    Where it is, a script that had to wait for a connection has waited since its time. Of every
    `keep_every`th the first answer is kept. Each address has `concurrency` connections.
    """
    generator = Generator(addresses, concurrency)
    try:
        return generator.run(scripts, per_s, keep_every)
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

    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection(("127.0.0.1", address.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.authorities:
            tls = ssl.create_default_context(cafile=address.authorities)
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
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
            except NOT_YET:
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
        except NOT_YET:
            return False
        return True

    def receive(self, buffer: bytearray) -> bytes | None:
        """The answer, once it is whole."""
        try:
            got = self.recv_into(buffer)
        except NOT_YET:  # what came was TLS's own
            return None
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

    def __init__(self, addresses: Sequence[Address], concurrency: int) -> None:
        self._connections: dict[int, Connection] = {}
        self._poll = select.epoll()
        # In turn: one that idles for long is closed by its server.
        self._free = deque(Connection(each) for _ in range(concurrency) for each in addresses)
        for each in self._free:
            self.add(each)
        self._buffer = bytearray(BUFFER_BYTES)
        self._begin((), 0)

    def _begin(self, scripts: Sequence[Script], keep_every: int) -> None:
        """Nothing is counted yet of these scripts."""
        self._scripts: Iterator[tuple[int, Script]] = enumerate(scripts)
        self._keep_every = keep_every
        self._latencies_s: list[list[float]] = [
            [] for _ in range(max(map(len, scripts), default=0))
        ]
        self._ended = 0
        self._refusals: list[Refusal] = []
        self._kept: list[tuple[int, bytes]] = []

    def run(self, scripts: Sequence[Script], per_s: float = math.inf, keep_every: int = 0) -> Load:
        """Carry out all of these; see `run_load`."""
        self._begin(scripts, keep_every)
        start_s = time.perf_counter()
        for begun in range(len(scripts)):
            due_s = start_s + begun / per_s if per_s < math.inf else 0.0
            while (due_s and time.perf_counter() < due_s) or not self._free:
                left_s = max(0.0, due_s - time.perf_counter())
                self.receive(left_s if self._free else PATIENCE_S)
            self.begin(self._free.popleft(), due_s or time.perf_counter())
        while self._ended < len(scripts):
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
        if timeout_s < PATIENCE_S:  # epoll waits for whole milliseconds
            select.select((self._poll,), (), (), timeout_s)
            timeout_s = 0.0
        events = self._poll.poll(timeout_s)
        if not events and timeout_s:
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
            self._refusals.append(Refusal(answer, step, latency_s))
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


class NatsGenerator:
    """The same over NATS: scripts of messages, `concurrency` of them at once on one connection.

    The replies to a script go to a subject that ends in its number.
    """

    def __init__(self, port: int, scripts: Sequence[Script], concurrency: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._scripts = scripts
        self._concurrency = concurrency
        self._received = b""
        self._steps = [0] * len(scripts)
        self._started_s = [0.0] * len(scripts)
        self._latencies_s: list[list[float]] = [[] for _ in range(max(map(len, scripts)))]
        self._kept: list[tuple[int, bytes]] = []
        self._begun = self._ended = 0

    def run(self, keep_every: int) -> Load:
        """Carry out all scripts. Raises RuntimeError for a refusal."""
        self._socket.sendall(f"{NATS_HELLO}SUB {NATS_INBOX}* 1\r\nPING\r\n".encode())
        while b"PONG\r\n" not in self._received:
            self._receive()
        self._received = b""
        start_s = time.perf_counter()
        self._socket.sendall(b"".join(self._begin() for _ in range(self._concurrency)))
        while self._ended < len(self._scripts):
            self._receive()
            now_s = time.perf_counter()
            wanted = [self._answered(each, now_s, keep_every) for each in self._messages()]
            if any(wanted):
                self._socket.sendall(b"".join(wanted))
        seconds = time.perf_counter() - start_s
        return Load(seconds=seconds, latencies_s=self._latencies_s, kept=self._kept)

    def close(self) -> None:
        self._socket.close()

    def _begin(self) -> bytes:
        """The first message of the next script; none if there is none."""
        if self._begun == len(self._scripts):
            return b""
        self._begun += 1
        return self._next(self._begun - 1, time.perf_counter())

    def _next(self, number: int, now_s: float) -> bytes:
        self._started_s[number] = now_s
        return self._scripts[number][self._steps[number]][0]

    def _receive(self) -> None:
        got = self._socket.recv(BUFFER_BYTES)
        if not got:
            raise ConnectionError("the bus closed the connection")
        self._received += got

    def _messages(self) -> Iterator[NatsMessage]:
        """Take the whole messages of what was received."""
        received, at = self._received, 0
        while (end := received.find(b"\r\n", at)) >= 0:
            words = received[at:end].split(b" ")
            if words[0] not in (b"MSG", b"HMSG"):
                if words[0] == b"PING":
                    self._socket.sendall(b"PONG\r\n")
                at = end + 2
                continue
            whole = end + 2 + int(words[-1])
            if len(received) < whole + 2:
                break
            head_bytes = int(words[-2]) if words[0] == b"HMSG" else 0
            head = received[end + 2 : end + 2 + head_bytes]
            yield int(words[1][len(NATS_INBOX) :]), head, received[end + 2 + head_bytes : whole]
            at = whole + 2
        self._received = received[at:]

    def _answered(self, message: NatsMessage, now_s: float, keep_every: int) -> bytes:
        """Count an answer; return the message that comes after it."""
        number, head, body = message
        if b"Nats-Service-Error" in head or not body:
            raise RuntimeError(f"refused over NATS: {head!r} {body!r}")
        step = self._steps[number]
        self._latencies_s[step].append(now_s - self._started_s[number])
        if not step and not number % keep_every:
            self._kept.append((number, body))
        self._steps[number] = step + 1
        if step + 1 < len(self._scripts[number]):
            return self._next(number, now_s)
        self._ended += 1
        return self._begin()


def nats_request(subject: str, number: int, body: bytes, content_type: str) -> bytes:
    """A request of script `number`, as it goes over the wire."""
    head = f"NATS/1.0\r\nContent-Type: {content_type}\r\nx-timeout-s: 65\r\n\r\n".encode()
    sizes = f"{len(head)} {len(head) + len(body)}"
    line = f"HPUB {subject} {NATS_INBOX}{number} {sizes}\r\n"
    return line.encode() + head + body + b"\r\n"
