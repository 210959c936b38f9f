"""Who listens at an endpoint? Looked at without ZMQ, which would try for ever and not say why."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal, TypeAlias

from msgspec import Struct

from router.tools.doctor import zmtp

TIMEOUT_S = 2.0
"""For each step."""

_QUOTED_BYTES = 20

Outcome: TypeAlias = Literal[
    "unresolved", "refused", "unreachable", "silent", "http", "other", "zmtp"
]


class PortSeen(Struct, frozen=True):
    """What was found at an endpoint.

    `also_at`: another address of this machine where the same port is open, if it was looked for on
    the loopback only. `detail`: the system's words, or the first bytes of another protocol.
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
        """May live events come from there?"""
        return self.outcome == "zmtp" and self.socket_type in (None, "PUB", "XPUB")


async def look_at(endpoint: str) -> PortSeen:
    """Resolve, connect, and hear who is there."""
    if endpoint.startswith("ipc://"):
        return await _heard(endpoint, [])
    host, port = host_and_port(endpoint)
    try:
        addresses = await _resolved(host, port)
    except OSError as error:
        return PortSeen(endpoint, "unresolved", str(error))
    seen = await _heard(endpoint, addresses)
    if seen.outcome == "zmtp" and all(address.startswith("127.") for address in addresses):
        return _with_also_at(seen, await _open_elsewhere(port))
    return seen


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Of a well-formed tcp:// endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


async def _resolved(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await asyncio.wait_for(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), TIMEOUT_S)
    return sorted({str(address[0]) for *_, address in found})


async def _heard(endpoint: str, addresses: list[str]) -> PortSeen:
    try:
        async with _connection(endpoint) as connection:
            first = await _greeted(*connection)
    except ConnectionRefusedError as error:
        return PortSeen(endpoint, "refused", str(error), addresses)
    except OSError as error:
        return PortSeen(endpoint, "unreachable", str(error) or type(error).__name__, addresses)
    if zmtp.is_zmtp(first):
        return PortSeen(
            endpoint,
            "zmtp",
            addresses=addresses,
            mechanism=zmtp.mechanism(first),
            socket_type=zmtp.socket_type(first[zmtp.GREETING_BYTES :]),
        )
    return await _other(endpoint, addresses, first)


async def _greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What the other says to a greeting, as far as it is one."""
    writer.write(zmtp.GREETING[: zmtp.VERSION_BYTES])
    first = await _read(reader, lambda heard: len(heard) >= zmtp.GREETING_BYTES)
    if not zmtp.is_zmtp(first) or zmtp.mechanism(first) != "NULL":
        return first
    writer.write(zmtp.GREETING[zmtp.VERSION_BYTES :])
    rest = first[zmtp.GREETING_BYTES :]
    if zmtp.socket_type(rest) is None:
        rest += await _read(reader, lambda heard: zmtp.socket_type(rest + heard) is not None)
    return first[: zmtp.GREETING_BYTES] + rest


async def _other(endpoint: str, addresses: list[str], first: bytes) -> PortSeen:
    """Something that speaks no ZMTP: most often an HTTP server, which waits for a request."""
    answer = first
    with suppress(OSError):
        async with _connection(endpoint) as (reader, writer):
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            answer = await _read(reader, lambda heard: len(heard) >= _QUOTED_BYTES) or first
    if answer.startswith(b"HTTP/"):
        return PortSeen(endpoint, "http", addresses=addresses)
    outcome: Outcome = "other" if answer else "silent"
    return PortSeen(endpoint, outcome, repr(answer[:_QUOTED_BYTES])[2:-1], addresses)


async def _read(reader: asyncio.StreamReader, is_enough: Callable[[bytes], bool]) -> bytes:
    """What comes until it is enough, the other hangs up, or time is over."""
    heard = b""
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(TIMEOUT_S):
            while not is_enough(heard) and (part := await reader.read(4096)):
                heard += part
    return heard


@asynccontextmanager
async def _connection(
    endpoint: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to an endpoint. Raises OSError."""
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
    """An address of this machine beyond the loopback where the port is open as well."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: it only chooses the address to send from
        address = str(probe.getsockname()[0])
        async with _connection(f"tcp://{address}:{port}"):
            return None if address.startswith("127.") else address
    return None


def _with_also_at(seen: PortSeen, address: str | None) -> PortSeen:
    return PortSeen(
        seen.endpoint, seen.outcome, seen.detail, seen.addresses, address, seen.mechanism,
        seen.socket_type,
    )  # fmt: skip
