"""The listener at an endpoint, examined without ZMQ, which retries and reports no reason.

The part of ZMTP that identifies a listener: greetings, and the type of the peer's socket.

    both     greeting, 64 bytes: FF … 7F │ version │ mechanism, 20 bytes │ role and filler
    each     READY, its metadata {"Socket-Type": "PUB", …}          (mechanism NULL)

Source: ZMTP 3.0 and 3.1 (rfc.zeromq.org, 23 and 37). A peer disconnects on a different mechanism,
so its mechanism is read before ours is sent. No READY is sent, so that the engine's socket never
counts this connection as a peer.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal, TypeAlias

from msgspec import Struct

GREETING_BYTES = 64
VERSION_BYTES = 12
"""The bytes of a greeting before the mechanism."""

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = slice(VERSION_BYTES, VERSION_BYTES + 20)
_READY = b"\x05READY"
_SOCKET_TYPE = b"socket-type"

GREETING = (_SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0")).ljust(GREETING_BYTES, b"\0")
"""Our greeting, sent first."""


def is_zmtp(first_bytes: bytes) -> bool:
    """Return whether these may be the first bytes of a ZMTP peer."""
    return (
        bool(first_bytes)
        and first_bytes[:1] == b"\xff"
        and (len(first_bytes) < len(_SIGNATURE) or first_bytes[9] & 1 == 1)
    )


def mechanism(greeting: bytes) -> str:
    """Return the security mechanism of a complete greeting: NULL, PLAIN, CURVE or another."""
    return greeting[_MECHANISM].rstrip(b"\0").decode(errors="backslashreplace")


def socket_type(frames: bytes) -> str | None:
    """Return the type of the peer's socket, sent after its greeting. Returns None if absent."""
    begin = frames.find(_READY)
    if begin < 0:
        return None
    at = begin + len(_READY)
    while at < len(frames):
        name_end = at + 1 + frames[at]
        value_begin = name_end + 4
        value_end = value_begin + int.from_bytes(frames[name_end:value_begin], "big")
        if frames[at + 1 : name_end].lower() == _SOCKET_TYPE:
            return frames[value_begin:value_end].decode(errors="backslashreplace")
        at = value_end
    return None


TIMEOUT_S = 2.0
"""The timeout of each step."""

_QUOTED_BYTES = 20

Outcome: TypeAlias = Literal[
    "unresolved", "refused", "unreachable", "silent", "http", "other", "zmtp"
]


class ObservedPort(Struct, frozen=True):
    """The observations at an endpoint.

    `also_at`: another address of this machine with the same port open, examined only if the
    endpoint is on the loopback. `detail`: the system's error message, or the first bytes of another
    protocol.
    """

    endpoint: str
    outcome: Outcome
    detail: str = ""
    addresses: list[str] = []
    also_at: str | None = None
    mechanism: str | None = None
    socket_type: str | None = None

    @property
    def is_publisher(self) -> bool:
        """True if live events may come from this endpoint."""
        return self.outcome == "zmtp" and self.socket_type in (None, "PUB", "XPUB")


async def probe_port(endpoint: str) -> ObservedPort:
    """Resolve an endpoint, connect, and identify its protocol."""
    if endpoint.startswith("ipc://"):
        return await _probed(endpoint, [])
    host, port = host_and_port(endpoint)
    try:
        addresses = await _resolved(host, port)
    except OSError as error:
        return ObservedPort(endpoint, "unresolved", str(error))
    seen = await _probed(endpoint, addresses)
    if seen.outcome == "zmtp" and all(address.startswith("127.") for address in addresses):
        return _with_also_at(seen, await _open_elsewhere(port))
    return seen


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Return host and port of a well-formed tcp:// endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


async def _resolved(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await asyncio.wait_for(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), TIMEOUT_S)
    return sorted({str(address[0]) for *_, address in found})


async def _probed(endpoint: str, addresses: list[str]) -> ObservedPort:
    try:
        async with _connection(endpoint) as connection:
            first = await _greeted(*connection)
    except ConnectionRefusedError as error:
        return ObservedPort(endpoint, "refused", str(error), addresses)
    except OSError as error:
        return ObservedPort(endpoint, "unreachable", str(error) or type(error).__name__, addresses)
    if is_zmtp(first):
        return ObservedPort(
            endpoint,
            "zmtp",
            addresses=addresses,
            mechanism=mechanism(first),
            socket_type=socket_type(first[GREETING_BYTES:]),
        )
    return await _other(endpoint, addresses, first)


async def _greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return the peer's bytes in response to a ZMTP greeting."""
    writer.write(GREETING[:VERSION_BYTES])
    first = await _read(reader, lambda received: len(received) >= GREETING_BYTES)
    if not is_zmtp(first) or mechanism(first) != "NULL":
        return first
    writer.write(GREETING[VERSION_BYTES:])
    rest = first[GREETING_BYTES:]
    if socket_type(rest) is None:
        rest += await _read(reader, lambda received: socket_type(rest + received) is not None)
    return first[:GREETING_BYTES] + rest


async def _other(endpoint: str, addresses: list[str], first: bytes) -> ObservedPort:
    """Classify a peer without ZMTP: most often an HTTP server, which waits for a request."""
    answer = first
    with suppress(OSError):
        async with _connection(endpoint) as (reader, writer):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            answer = await _read(reader, lambda received: len(received) >= _QUOTED_BYTES) or first
    if answer.startswith(b"HTTP/"):
        return ObservedPort(endpoint, "http", addresses=addresses)
    outcome: Outcome = "other" if answer else "silent"
    return ObservedPort(endpoint, outcome, repr(answer[:_QUOTED_BYTES])[2:-1], addresses)


async def _read(reader: asyncio.StreamReader, is_enough: Callable[[bytes], bool]) -> bytes:
    """Return the bytes received until they suffice, the peer disconnects, or the timeout."""
    received = b""
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(TIMEOUT_S):
            while not is_enough(received) and (part := await reader.read(4096)):
                received += part
    return received


@asynccontextmanager
async def _connection(
    endpoint: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to an endpoint. Raises OSError."""
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await _connected(endpoint)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _connected(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if endpoint.startswith("ipc://"):
        return await asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
    return await asyncio.open_connection(*host_and_port(endpoint))


async def _open_elsewhere(port: int) -> str | None:
    """Return an address of this machine beyond the loopback with the same port open."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: it only selects the source address
        address = str(probe.getsockname()[0])
        async with _connection(f"tcp://{address}:{port}"):
            return None if address.startswith("127.") else address
    return None


def _with_also_at(seen: ObservedPort, address: str | None) -> ObservedPort:
    return ObservedPort(
        seen.endpoint, seen.outcome, seen.detail, seen.addresses, address, seen.mechanism,
        seen.socket_type,
    )  # fmt: skip
