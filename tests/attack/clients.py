"""Clients of attackers: over HTTP with times, over raw sockets, and over NATS by hand."""

import http.client
import json
import socket
import time
from contextlib import contextmanager, suppress

from msgspec import Struct

TIMEOUT_S = 60.0


class Reply(Struct, frozen=True):
    """A response. `first_byte_s`: after which time its first content was there."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    first_byte_s: float = 0.0

    def json(self):
        return json.loads(self.body)

    @property
    def code(self):
        """The code of a refusal, in the form of the router or of OpenAI."""
        error = self.json()
        return error["code"] if "code" in error else error["error"]["code"]


class HttpClient:
    """One connection that is kept, for one token."""

    def __init__(self, port, token=None):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.close()

    def ask(self, method, path, body=None, **headers):
        """Send a request; `body` is bytes, or JSON. Returns the reply."""
        said = {**self._headers, **headers}
        if body is not None:
            said.setdefault("content-type", "application/json")
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        begin = time.perf_counter()
        self._connection.request(method, path, body, said)
        reply = self._connection.getresponse()
        first = reply.readline() if reply.headers.get("transfer-encoding") else reply.read()
        took = time.perf_counter() - begin
        return Reply(reply.status, reply.getheaders(), first + reply.read(), took)


@contextmanager
def connected(port):
    """A raw connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        yield connection


def answers(port, request):
    """Everything that is answered until the server closes; bytes that it refuses are lost."""
    with connected(port) as connection:
        with suppress(ConnectionError):
            connection.sendall(request)
        return read_all(connection)


def read_all(connection):
    """Everything until the end of a connection."""
    received = b""
    with suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            received += data
    return received


def until_closed(connection, more=b"", pause_s=0.05, timeout_s=TIMEOUT_S):
    """Send `more` again and again until the server ends the connection. Returns what it said."""
    received, deadline_s = b"", time.monotonic() + timeout_s
    connection.settimeout(pause_s)
    while time.monotonic() < deadline_s:
        try:
            if more:
                connection.sendall(more)
            data = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except ConnectionError:
            return received
        if not data:
            return received
        received += data
    raise TimeoutError(f"still open after {timeout_s} s")


class NatsWire:
    """The protocol of NATS by hand: clients' libraries would not send what attackers do."""

    def __init__(self, port):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._file = self._socket.makefile("rb")
        self._inbox = f"_INBOX.attack{time.monotonic_ns()}"
        self._subscriptions = self._requests = 0
        self._seen = set()
        self._file.readline()  # INFO
        self.send(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}')
        self.subscribe(f"{self._inbox}.*")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()
        self._socket.close()

    def send(self, line):
        self._socket.sendall(line + b"\r\n")

    def subscribe(self, subject):
        self._subscriptions += 1
        self.send(b"SUB %s %d" % (subject.encode(), self._subscriptions))

    def publish(self, subject, payload, reply="", head=None):
        """Publish, with a header as it is, however wrong, and a reply subject."""
        where = f"{subject} {reply}".strip().encode()
        if head is None:
            self.send(b"PUB %s %d\r\n%s" % (where, len(payload), payload))
        else:
            sizes = b"%d %d" % (len(head), len(head) + len(payload))
            self.send(b"HPUB %s %s\r\n%s%s" % (where, sizes, head, payload))

    def flush(self):
        """Wait until the server has seen everything. Returns all messages' subjects so far."""
        self.send(b"PING")
        while self._next() is not None:
            pass
        return self._seen

    def request(self, subject, body, token=None):
        """Ask. Returns the reply's payload as bytes."""
        self._requests += 1
        reply = f"{self._inbox}.{self._requests}"
        head = b"NATS/1.0\r\n"
        if token is not None:
            head += b"Authorization: Bearer %s\r\n" % token.encode()
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.publish(subject, payload, reply, head + b"\r\n")
        while True:
            message = self._next()
            if message is not None and message[0] == reply:
                return message[1]

    def message(self):
        """Wait for the next message. Returns its payload."""
        while (message := self._next()) is None:
            pass
        return message[1]

    def _next(self):
        """The next message's subject and payload; None for the answer to PING."""
        while True:
            line = self._file.readline()
            if not line:
                raise ConnectionError("nats-server has closed the connection")
            operation, *arguments = line.split()
            if operation == b"PONG":
                return None
            if operation == b"PING":
                self.send(b"PONG")
            elif operation in (b"MSG", b"HMSG"):
                whole = self._file.read(int(arguments[-1]) + 2)[:-2]
                head = int(arguments[-2]) if operation == b"HMSG" else 0
                self._seen.add(arguments[0].decode())
                return arguments[0].decode(), whole[head:]
            elif operation == b"-ERR":
                raise ConnectionError(line.decode())
