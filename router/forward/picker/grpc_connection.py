"""A connection of a gateway: gRPC over HTTP/2, both as far as pickers need them.

    bytes ─▶ `http2` ─▶ streams ─▶ messages ─▶ handler ─▶ answers ─▶ `http2` ─▶ one write

This module adds gRPC's framing and its status. All is synchronous: a message is answered in the
callback that received it, and the answers to all messages of a read leave in one write. grpcio has
a thread and several system calls for each message of each stream.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from struct import Struct as Layout
from typing import Protocol, TypeAlias

from router.forward.picker.frames import STATUS_200, Http2Error, literal
from router.forward.picker.http2 import Http2Connection, Http2Stream

log = logging.getLogger(__name__)

OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 3, 8, 12, 13
"""Statuses of gRPC."""

_PREFIX = Layout(">BL")  # whether it is compressed, length
_HEAD = STATUS_200 + literal(b"content-type", b"application/grpc")
_STATUS = {
    status: literal(b"grpc-status", b"%d" % status)
    for status in (OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL)
}


class Handler(Protocol):
    """The work of one stream.

    `limit_bytes`: of its next message; a longer one is not received, and `oversized` is called.
    """

    @property
    def limit_bytes(self) -> int:
        """The limit of the next message."""
        ...

    def expects(self, size_bytes: int) -> None:
        """Note that a message of this size has begun, and is held until it is whole."""
        ...

    def received(self, message: bytes) -> None:
        """Handle a message."""
        ...

    def oversized(self) -> None:
        """Handle a message beyond the limit; no further one is received."""
        ...

    def ended(self) -> None:
        """Handle the end of the client's messages."""
        ...

    def lost(self) -> None:
        """Handle the end of a stream that was cut off: nothing can be sent any more."""
        ...


Service: TypeAlias = Callable[["GrpcStream"], Handler]
Services: TypeAlias = Mapping[bytes, Service]
"""Services by the path of their method."""


class GrpcStream:
    """One stream. `send` and `finish` do nothing once it is over."""

    __slots__ = ("_http", "_is_deaf", "_needed_bytes", "_pieces", "_sent", "handler")

    handler: Handler

    def __init__(self, http: Http2Stream, sent: Callable[[], None]) -> None:
        self._http = http
        self._sent = sent
        self._is_deaf = False
        self._pieces: list[bytes] = []
        self._needed_bytes = 0

    def send(self, messages: Sequence[bytes]) -> None:
        """Send messages, as soon as the client takes them."""
        if messages:
            framed: list[bytes] = []
            for each in messages:
                framed += (_PREFIX.pack(0, len(each)), each)
            self._http.send(b"".join(framed))
            self._sent()

    def finish(self, status: int = OK) -> None:
        """End the stream with a status, behind what was sent."""
        self._http.finish(_STATUS[status])
        self._sent()

    def fail(self, status: int) -> None:
        """End the stream for both sides."""
        self._is_deaf = True
        self.finish(status)
        self.handler.lost()

    def receive(self, data: bytes) -> None:
        """Handle received bytes, which may end none, one or some messages."""
        try:
            self._receive(data)
        except Exception:  # noqa: BLE001 a bug; other streams continue
            self._note_bug()

    def ended(self) -> None:
        """Handle the end of the client's messages."""
        try:
            self.handler.ended()
        except Exception:  # noqa: BLE001 a bug; other streams continue
            self._note_bug()

    def lost(self) -> None:
        """Handle the end of a stream that was cut off."""
        self._is_deaf = True
        self.handler.lost()

    def _note_bug(self) -> None:
        log.exception("a gateway's stream failed: internal error")
        self.fail(INTERNAL)

    def _receive(self, data: bytes) -> None:
        if self._pieces:
            self._pieces.append(data)
            self._needed_bytes -= len(data)
            if self._needed_bytes > 0:
                return
            data, self._pieces = b"".join(self._pieces), []
        start, end = 0, len(data)
        while end - start >= _PREFIX.size and not self._is_deaf:
            behind = start + _PREFIX.size
            size_bytes = int.from_bytes(data[start + 1 : behind], "big")
            if not self._may_receive(size_bytes, is_compressed=data[start] != 0):
                return
            if behind + size_bytes > end:
                self.handler.expects(size_bytes)
                self._hold(data[start:], behind + size_bytes - start)
                return
            start = behind + size_bytes
            self.handler.received(data[behind:start])
        if start < end:
            self._hold(data[start:], _PREFIX.size)

    def _hold(self, begin: bytes, size_bytes: int) -> None:
        """Hold the begin of a message, or of its prefix, until `size_bytes` are there."""
        self._pieces, self._needed_bytes = [begin], size_bytes - len(begin)

    def _may_receive(self, size_bytes: int, *, is_compressed: bool) -> bool:
        if is_compressed:  # no encoding was offered
            self.fail(UNIMPLEMENTED)
        elif size_bytes > self.handler.limit_bytes:
            self._is_deaf = True
            self.handler.oversized()
        return not self._is_deaf


class _Unknown:
    """The stream of a method that does not exist."""

    __slots__ = ()

    limit_bytes = 0

    def __init__(self, stream: GrpcStream) -> None:
        stream.finish(UNIMPLEMENTED)

    def expects(self, size_bytes: int) -> None:
        """Do nothing."""

    def received(self, message: bytes) -> None:
        """Do nothing: the stream is over."""

    def oversized(self) -> None:
        """Do nothing."""

    def ended(self) -> None:
        """Do nothing."""

    def lost(self) -> None:
        """Do nothing."""


class GrpcConnection(asyncio.Protocol):
    """One connection. `all_open`: those of the server; beyond `most`, it is closed at once.

    `is_held`: the gateway does not read, and answers are held until it does.
    """

    def __init__(
        self,
        services: Services,
        all_open: set["GrpcConnection"],
        most: int,
    ) -> None:
        self._services = services
        self._all_open = all_open
        self._most = most
        self._http = Http2Connection(self._begin, _HEAD)
        self._is_receiving = self._is_to_flush = False
        self.is_held = self._is_stuck = False
        self._is_idle = self._is_pinged = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the settings of this side."""
        self._transport = transport
        if len(self._all_open) >= self._most:
            log.warning("a gateway's connection is closed: there are %d", self._most)
            transport.abort()
            return
        self._all_open.add(self)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, and send the answers to all of them."""
        self._is_idle = False
        self._is_receiving = True
        try:
            self._http.receive(data)
        except Http2Error as error:
            log.warning("a gateway's connection is closed: %s", error)
            self._http.close(error.code)
            self._flush()
            self._transport.close()
            return
        finally:
            self._is_receiving = False
        self._flush()

    def _begin(self, http: Http2Stream, path: bytes) -> GrpcStream:
        stream = GrpcStream(http, self._flush_soon)
        stream.handler = self._services.get(path, _Unknown)(stream)
        return stream

    # ── Sending ──────────────────────────────────────────────────────────────────────────────────

    def _flush_soon(self) -> None:
        if not self._is_receiving and not self._is_to_flush:
            self._is_to_flush = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_to_flush = False
        data, transport = self._http.taken(), self._transport
        if data and not transport.is_closing():
            transport.write(data)

    def pause_writing(self) -> None:
        """Hold what is to be sent: the gateway does not read."""
        self.is_held = True
        self._http.hold()

    def resume_writing(self) -> None:
        """Send what was held."""
        self.is_held = self._is_stuck = False
        self._http.release()
        self._flush_soon()

    # ── The connection ───────────────────────────────────────────────────────────────────────────

    def check_alive(self) -> None:
        """Ping a gateway that was silent since the last call; close if it was so at the ping.

        Close the connection of a gateway as well that has read nothing since the last call.
        """
        self._http.renew()
        if self._is_stuck or (self._is_idle and self._is_pinged):
            self._transport.abort()
            return
        self._is_stuck = self.is_held
        if self._is_idle:
            self._is_pinged = True
            self._http.ping()
            self._flush()
        else:
            self._is_idle, self._is_pinged = True, False

    def close(self) -> None:
        """Close the connection, and cut off its streams."""
        if not self._transport.is_closing():
            self._http.close()
            self._flush()
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Cut off all streams."""
        self._http.lose_all()
        self._all_open.discard(self)
