"""A connection of a gateway: gRPC over HTTP/2, both as far as pickers need them.

    bytes ─▶ h2: frames, windows, headers ─▶ streams ─▶ messages ─▶ handler ─▶ answers ─▶ one write

`h2` is the HTTP/2; this module adds gRPC's framing and its status. All is synchronous: a message is
answered in the callback that received it, and the answers to all messages of a read leave in one
write. grpcio has a thread and several system calls for each message of each stream: for requests
of 2 KB it takes 1.6 times the processor time of this, one at a time 1.8 times.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

log = logging.getLogger(__name__)

OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 3, 8, 12, 13
"""Statuses of gRPC."""

WINDOW_BYTES = 1 << 20
CONNECTION_WINDOW_BYTES = 1 << 24
"""Bytes of bodies that a gateway may send ahead, on a stream and on a connection."""

_PREFIX_BYTES = 5
_HEAD_BYTES = 65_536
_MOST_CLOSED = 64
_PING = b"kvrouter"
_HEAD = ((b":status", b"200"), (b"content-type", b"application/grpc"))


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

    __slots__ = (
        "_connection",
        "_is_begun",
        "_is_deaf",
        "_needed_bytes",
        "_pieces",
        "_status",
        "_unsent",
        "handler",
        "is_over",
        "number",
    )

    handler: Handler

    def __init__(self, connection: "GrpcConnection", number: int) -> None:
        self._connection = connection
        self._is_begun = self._is_deaf = False
        self._pieces: list[bytes] = []
        self._needed_bytes = 0
        self._status: int | None = None
        self._unsent = memoryview(b"")
        self.is_over = False
        self.number = number

    def send(self, messages: Sequence[bytes]) -> None:
        """Send messages, as soon as the client takes them."""
        if messages and not self.is_over:
            framed = [b"\0" + len(each).to_bytes(4, "big") + each for each in messages]
            self._unsent = memoryview(b"".join((self._unsent, *framed)))
            self._connection.push(self)

    def finish(self, status: int = OK) -> None:
        """End the stream with a status, behind what was sent."""
        if not self.is_over and self._status is None:
            self._status = status
            self._connection.push(self)

    def fail(self, status: int) -> None:
        """End the stream for both sides."""
        self._is_deaf = True
        self.finish(status)
        self.handler.lost()

    def receive(self, data: bytes) -> None:
        """Handle received bytes, which may end none, one or some messages."""
        if self._pieces:
            self._pieces.append(data)
            self._needed_bytes -= len(data)
            if self._needed_bytes > 0:
                return
            data, self._pieces = b"".join(self._pieces), []
        start, end = 0, len(data)
        while end - start >= _PREFIX_BYTES and not self._is_deaf:
            behind = start + _PREFIX_BYTES
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
            self._hold(data[start:], _PREFIX_BYTES)

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

    def push(self, http: H2Connection) -> bool:
        """Give h2 what the client's windows allow. Returns whether the stream has ended."""
        try:
            return self._push(http)
        except ProtocolError:  # it was reset, of which h2 has not yet informed this side
            self.is_over, self._unsent = True, memoryview(b"")
            return False

    def _push(self, http: H2Connection) -> bool:
        number, unsent = self.number, self._unsent
        if not self._is_begun:
            self._is_begun = True
            http.send_headers(number, _HEAD)
        while unsent:
            size_bytes = min(http.local_flow_control_window(number), http.max_outbound_frame_size)
            if size_bytes <= 0:
                self._unsent = unsent
                return False
            http.send_data(number, unsent[:size_bytes])
            unsent = unsent[size_bytes:]
        self._unsent = unsent
        if self._status is None:
            return False
        self.is_over = True
        http.send_headers(number, ((b"grpc-status", b"%d" % self._status),), end_stream=True)
        return True

    @property
    def is_blocked(self) -> bool:
        """True if the client's windows hold something back."""
        return bool(self._unsent)


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


class _Http(H2Connection):
    """h2's connection, with a count of open streams in amortized constant time.

    h2 visits all streams whenever one begins; a picker has thousands, each as long as an answer.
    """

    def __init__(self, config: H2Configuration) -> None:
        super().__init__(config)
        self._next_visit = _MOST_CLOSED

    @property
    def open_inbound_streams(self) -> int:
        """The number of open streams, or a lower one; at times it drops the closed ones."""
        if len(self.streams) < self._next_visit:
            return 0
        still_open = super().open_inbound_streams
        self._next_visit = 2 * still_open + _MOST_CLOSED
        return still_open


class GrpcConnection(asyncio.Protocol):
    """One connection. `all_open`: those of the server; beyond `most`, it is closed at once."""

    def __init__(
        self,
        services: Services,
        all_open: set["GrpcConnection"],
        most: int,
    ) -> None:
        self._services = services
        self._all_open = all_open
        self._most = most
        self._http = _Http(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                # They are read for the path alone, and passed on to no one: a tenth of the time.
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self._streams: dict[int, GrpcStream] = {}
        self._blocked: dict[int, GrpcStream] = {}
        self._is_receiving = self._is_paused = self._is_to_flush = False
        self._is_idle = self._is_pinged = False
        self._handles: dict[type[Event], Callable[[Any], None]] = {
            DataReceived: self._receive,
            RequestReceived: self._begin,
            StreamEnded: self._end,
            StreamReset: self._lose,
            WindowUpdated: self._push_blocked,
            RemoteSettingsChanged: self._push_blocked,
        }

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the settings of this side."""
        self._transport = transport
        if len(self._all_open) >= self._most:
            log.warning("a gateway's connection is closed: there are %d", self._most)
            transport.abort()
            return
        self._all_open.add(self)
        http = self._http
        limits = {
            SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
            SettingCodes.MAX_CONCURRENT_STREAMS: 2**31 - 1,  # a gateway would wait; see PickerCall
            SettingCodes.MAX_HEADER_LIST_SIZE: _HEAD_BYTES,
        }
        http.local_settings = Settings(client=False, initial_values=limits)
        http.initiate_connection()
        http.increment_flow_control_window(CONNECTION_WINDOW_BYTES)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, and send the answers to all of them."""
        self._is_idle = False
        self._is_receiving = True
        try:
            for event in self._http.receive_data(data):
                self._handle(event)
        except ProtocolError as error:
            log.warning("a gateway's connection is closed: %s", error)
            self._is_receiving = False
            self._flush()
            self._transport.close()
            return
        self._is_receiving = False
        self._flush()

    def _handle(self, event: Event) -> None:
        handle = self._handles.get(type(event))
        if handle is None:
            return
        try:
            handle(event)
        except ProtocolError:
            raise
        except Exception:  # a bug; other streams continue
            log.exception("a gateway's stream failed: internal error")
            stream = self._streams.get(getattr(event, "stream_id", 0))
            if stream is not None:
                stream.fail(INTERNAL)

    def _receive(self, event: DataReceived) -> None:
        number, size_bytes = event.stream_id, event.flow_controlled_length
        stream = self._streams.get(number)
        if stream is not None:
            stream.receive(event.data)
        if size_bytes:
            self._http.acknowledge_received_data(size_bytes, number)

    def _begin(self, event: RequestReceived) -> None:
        stream = self._streams[event.stream_id] = GrpcStream(self, event.stream_id)
        path = next((value for name, value in event.headers if name == b":path"), b"")
        stream.handler = self._services.get(bytes(path), _Unknown)(stream)

    def _end(self, event: StreamEnded) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            stream.handler.ended()

    def _lose(self, event: StreamReset) -> None:
        self._cut_off(event.stream_id)

    def _cut_off(self, number: int) -> None:
        self._blocked.pop(number, None)
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.is_over = True
            stream.handler.lost()

    # ── Sending ──────────────────────────────────────────────────────────────────────────────────

    def push(self, stream: GrpcStream) -> None:
        """Send what a stream has to send, now or once the client takes it."""
        if self._is_paused:
            self._blocked[stream.number] = stream
            return
        if stream.push(self._http):
            self._streams.pop(stream.number, None)
        elif stream.is_blocked:
            self._blocked[stream.number] = stream
        if not self._is_receiving and not self._is_to_flush:
            self._is_to_flush = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _push_blocked(self, _: Event | None = None) -> None:
        blocked, self._blocked = self._blocked, {}
        for stream in blocked.values():
            self.push(stream)

    def _flush(self) -> None:
        self._is_to_flush = False
        data = self._http.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def pause_writing(self) -> None:
        """Hold what is to be sent: the gateway does not read."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Send what was held."""
        self._is_paused = False
        self._push_blocked()

    # ── The connection ───────────────────────────────────────────────────────────────────────────

    def check_alive(self) -> None:
        """Ping a gateway that was silent since the last call; close if it was so at the ping."""
        if self._is_idle and self._is_pinged:
            self._transport.abort()
        elif self._is_idle:
            self._is_pinged = True
            self._http.ping(_PING)
            self._flush()
        else:
            self._is_idle, self._is_pinged = True, False

    def close(self) -> None:
        """Close the connection, and cut off its streams."""
        if not self._transport.is_closing():
            self._http.close_connection()
            self._flush()
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Cut off all streams."""
        for number in list(self._streams):
            self._cut_off(number)
        self._all_open.discard(self)
