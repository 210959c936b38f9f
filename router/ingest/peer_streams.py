"""The streams of this router's messages to other routers, which request them over HTTP.

    PeerBus.send ─▶ a queue for each router ─▶ the response to its POST /replica_sync/stream

A stream is what a subscription is on a bus: it carries this router's frames, and its messages to
the router at the other end. Queues are bounded: what does not fit is dropped and counted, and the
other router notices the gap by the next frame and requests a snapshot.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum

from msgspec import msgpack

from router.errors import KvRouterError, WireError
from router.ingest.errors import PeerConflictError, PeerItselfError, TooManyPeersError
from router.protocol.replicas import PeerGreeting
from router.protocol.values import decode
from router.runtime.bus.errors import BusUnavailableError
from router.sequence.replicas.replica_set import MAX_REPLICAS

MOST_WAITING_BYTES = 4 << 20
"""Limit of the bytes that wait for one router; one message may exceed it."""

MOST_RECORD_BYTES = 64 << 20
"""Limit of a received record. A reservation takes 8 bytes per block."""


class Kind(IntEnum):
    """The kind of a record: the first one is a greeting, the others are messages."""

    GREETING = 0
    FRAME = 1
    TO_ONE = 2


_HEAD_BYTES = 5


class NotServingError(KvRouterError):
    """A request for a stream of a router that stops."""

    code = "draining"
    http_status = 503

    def __init__(self) -> None:
        super().__init__("this router stops")


def encode_record(kind: Kind, payload: bytes) -> bytes:
    """Return the bytes of a record: the length of its payload (4 bytes), its kind, its payload."""
    return len(payload).to_bytes(_HEAD_BYTES - 1, "big") + bytes((kind,)) + payload


class RecordReader:
    """Cuts the bytes of a stream into records."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Yield the records that are complete now. Raises WireError for an invalid head."""
        self._bytes += data
        while len(self._bytes) >= _HEAD_BYTES:
            size_bytes = int.from_bytes(self._bytes[: _HEAD_BYTES - 1], "big")
            kind, end = self._bytes[_HEAD_BYTES - 1], _HEAD_BYTES + size_bytes
            if size_bytes > MOST_RECORD_BYTES or kind not in _KINDS:
                raise WireError(f"a record of kind {kind} and {size_bytes} bytes")
            if len(self._bytes) < end:
                return
            record = bytes(self._bytes[_HEAD_BYTES:end])
            del self._bytes[:end]
            yield Kind(kind), record


_KINDS = frozenset(Kind)
_greetings: msgpack.Decoder[PeerGreeting] = msgpack.Decoder(PeerGreeting)


def decode_greeting(payload: bytes) -> PeerGreeting:
    """Return the first record of a stream. Raises WireError."""
    return decode(_greetings.decode, payload)


class PeerStream:
    """The bytes that wait for one router. Invariant: above the limit, a single record waits."""

    __slots__ = ("_changed", "_is_over", "_records", "_room", "_waiting_bytes", "greeting")

    def __init__(self, greeting: PeerGreeting) -> None:
        self.greeting = greeting
        self._records: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_over = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    def offer(self, record: bytes) -> bool:
        """Append a record. Returns False if there is no room for it."""
        is_full = self._waiting_bytes and self._waiting_bytes + len(record) > MOST_WAITING_BYTES
        if self._is_over or is_full:
            self._room.clear()
            return False
        self._records.append(record)
        self._waiting_bytes += len(record)
        self._changed.set()
        return True

    async def until_read(self) -> None:
        """Wait until the other router has read something, after an offer without room."""
        await self._room.wait()

    async def take(self) -> bytes:
        """Return what waits, once there is something; b"" at the end of the stream."""
        await self._changed.wait()
        waiting = b"".join(self._records)
        self._records.clear()
        self._waiting_bytes = 0
        self._room.set()
        if not self._is_over:
            self._changed.clear()
        return waiting

    def end(self) -> None:
        """End the stream behind what waits."""
        self._is_over = True
        self._changed.set()


class PeerStreams:
    """The streams by router: the newest of each, up to MAX_REPLICAS. `overflows`: records dropped.

    `joined`: called when a router has requested a stream, which shows that it can be reached.
    """

    __slots__ = ("_greeting", "_is_closed", "_joined", "_streams", "overflows")

    def __init__(self, greeting: PeerGreeting, joined: Callable[[], None]) -> None:
        self._greeting = greeting
        self._joined = joined
        self._streams: dict[int, PeerStream] = {}
        self._is_closed = False
        self.overflows = 0

    def __len__(self) -> int:
        return len(self._streams)

    def join(self, greeting: PeerGreeting) -> PeerStream:
        """Return a new stream; an earlier one of the same router ends.

        Raises PeerConflictError, PeerItselfError, TooManyPeersError, NotServingError.
        """
        _check(self._greeting, greeting)
        if self._is_closed:
            raise NotServingError
        earlier = self._streams.pop(greeting.router_id, None)
        if earlier is not None:
            earlier.end()
        if len(self._streams) >= MAX_REPLICAS:
            raise TooManyPeersError(MAX_REPLICAS)
        stream = self._streams[greeting.router_id] = PeerStream(greeting)
        stream.offer(encode_record(Kind.GREETING, msgpack.encode(self._greeting)))
        self._joined()
        return stream

    def leave(self, stream: PeerStream) -> None:
        """Remove a stream whose connection has ended."""
        stream.end()
        if self._streams.get(stream.greeting.router_id) is stream:
            del self._streams[stream.greeting.router_id]

    def to(self, router_id: int) -> PeerStream:
        """Return the stream of a router. Raises BusUnavailableError without one."""
        stream = self._streams.get(router_id)
        if stream is None:
            raise BusUnavailableError(f"router {router_id} is not connected")
        return stream

    def publish(self, record: bytes) -> None:
        """Append a record to every stream that has room."""
        for stream in self._streams.values():
            if not stream.offer(record):
                self.overflows += 1

    def close(self) -> None:
        """End all streams, and accept no more."""
        self._is_closed = True
        for stream in self._streams.values():
            stream.end()


def _check(ours: PeerGreeting, theirs: PeerGreeting) -> None:
    """Raise an error unless these routers can share reservations."""
    if theirs.router_id == ours.router_id:
        if theirs.incarnation == ours.incarnation:
            raise PeerItselfError
        reason = f"{ours.name!r} with the same HTTP port is the name of two routers"
        raise PeerConflictError("name", reason, "a name of its own for each router")
    if theirs.namespace != ours.namespace:
        reason = f"{theirs.namespace!r} there, {ours.namespace!r} here"
        raise PeerConflictError("namespace", reason, "the same in all routers")
    if theirs.scheme != ours.scheme:
        reason = f"blocks are named by {theirs.scheme} there, by {ours.scheme} here"
        allowed = "the same block_key_file and router_tracking_key_file in all routers"
        raise PeerConflictError("block_key_file", reason, allowed)
