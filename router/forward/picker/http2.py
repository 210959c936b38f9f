"""The server's side of HTTP/2, as far as gRPC needs it. Synchronous, without I/O.

    received bytes ─▶ frames ─▶ streams ─▶ receivers ─▶ send(), finish() ─▶ frames ─▶ `taken`

`hpack` reads the headers; of what this side sends, no header is compressed. No request is pushed,
and priorities are ignored. An error of a stream ends its connection, as RFC 9113 (5.4) permits.
The library h2, which is for any use, takes twice the processor time of a whole request.

Sources: RFC 9113, RFC 7541; CVE-2023-44487 (resets), CVE-2024-27316 (continuations).
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from router.forward.picker import frames
from router.forward.picker.frames import Http2Error, frame, window
from router.forward.picker.paths import MOST_HEAD_BYTES, PathReader

WINDOW_BYTES = 1 << 20
CONNECTION_WINDOW_BYTES = 1 << 24
"""Bytes of bodies that a client may send ahead, on a stream and on a connection."""

MOST_FRAME_BYTES = 1 << 14
"""Limit of a received frame, which is the protocol's: Envoy 1.40 sends no longer ones if it may."""

MOST_WASTED = 10_000
"""Limit of frames that carry nothing, and of streams reset before their first answer, between two
calls of `renew`."""

_MOST_SETTINGS = 64
_PING = b"kvrouter"
_SETTINGS_SENT = {
    frames.MOST_STREAMS: frames.MOST_WINDOW_BYTES,  # a gateway would wait; see PickerCall
    frames.INITIAL_WINDOW: WINDOW_BYTES,
    frames.HEAD_LIST: MOST_HEAD_BYTES,
}


class Receiver(Protocol):
    """The receiver of a stream. It raises nothing."""

    def receive(self, data: bytes) -> None:
        """Handle bytes of the body."""
        ...

    def ended(self) -> None:
        """Handle the end of what the client sends."""
        ...

    def lost(self) -> None:
        """Handle the end of a stream that was cut off: nothing can be sent any more."""
        ...


class Http2Stream:
    """One stream. `window_bytes`: that the client takes; `is_over`: this side has ended it.

    `receiver`: set by the one that begins it. `send` and `finish` do nothing once it is over.
    """

    __slots__ = (
        "_connection",
        "credit_bytes",
        "end",
        "has_ended",
        "is_begun",
        "is_over",
        "number",
        "receiver",
        "unsent",
        "window_bytes",
    )

    receiver: Receiver

    def __init__(self, connection: "Http2Connection", number: int, window_bytes: int) -> None:
        self._connection = connection
        self.end: bytes | None = None
        self.unsent: deque[memoryview] = deque()
        self.credit_bytes = WINDOW_BYTES
        self.has_ended = self.is_begun = self.is_over = False
        self.number = number
        self.window_bytes = window_bytes

    def send(self, data: bytes) -> None:
        """Send bytes, as soon as the client takes them."""
        if not self.is_over and self.end is None and data:
            self.unsent.append(memoryview(data))
            self._connection.push(self)

    def finish(self, block: bytes) -> None:
        """End this side behind what was sent, with trailers as a block of RFC 7541."""
        if not self.is_over and self.end is None:
            self.end = block
            self._connection.push(self)

    def drop(self) -> None:
        """Drop what was not sent: the stream is over."""
        self.is_over = True
        self.unsent.clear()

    @property
    def is_blocked(self) -> bool:
        """True if something waits for the client to take it."""
        return not self.is_over and (bool(self.unsent) or self.end is not None)


class Http2Connection:
    """One connection.

    `begin`: called with each new stream and its path; returns the stream's receiver. `head`: a
    block of the headers that every stream sends first.
    """

    def __init__(self, begin: Callable[[Http2Stream, bytes], Receiver], head: bytes) -> None:
        self._begin = begin
        self._head = head
        self._streams: dict[int, Http2Stream] = {}
        self._blocked: dict[int, Http2Stream] = {}
        self._out: list[bytes | memoryview] = []
        self._received = bytearray()
        self._needed_bytes = 1
        self._begun_block: tuple[int, int, bytearray] | None = None
        self._paths = PathReader()
        self._is_new = self._is_without_settings = self._is_first_head = True
        self._is_held = False
        self._last = 0
        self._wasted = 0
        self._credit_bytes = CONNECTION_WINDOW_BYTES
        self._window_bytes = self._first_window_bytes = frames.DEFAULT_WINDOW_BYTES
        self._frame_bytes = frames.LEAST_FRAME_BYTES
        self._handles: dict[int, Callable[[int, int, bytes], None]] = {
            frames.DATA: self._data,
            frames.HEADERS: self._headers,
            frames.PRIORITY: self._priority,
            frames.RESET: self._reset,
            frames.SETTINGS: self._settings,
            frames.PUSH: self._unexpected,
            frames.PING: self._ping,
            frames.WINDOW: self._window,
            frames.CONTINUATION: self._unexpected,
        }
        settings = b"".join(frames.SETTING.pack(*each) for each in _SETTINGS_SENT.items())
        more_bytes = CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES
        self._out += [frame(frames.SETTINGS, 0, 0, settings), window(0, more_bytes)]

    # ── Receiving ────────────────────────────────────────────────────────────────────────────────

    def receive(self, data: bytes) -> None:
        """Handle received bytes. Raises Http2Error, which ends the connection."""
        received = self._received
        if received:
            received += data
            if len(received) < self._needed_bytes:
                return
            data = bytes(received)
            received.clear()
        at, end = self._preface(data) if self._is_new else 0, len(data)
        while end - at >= frames.HEAD.size and not self._is_new:
            high, low, kind, flags, number = frames.HEAD.unpack_from(data, at)
            size_bytes, behind = high << 8 | low, at + frames.HEAD.size
            if size_bytes > MOST_FRAME_BYTES:
                raise Http2Error(frames.FRAME_SIZE, f"a frame of {size_bytes} bytes")
            if behind + size_bytes > end:
                self._needed_bytes = frames.HEAD.size + size_bytes
                break
            at = behind + size_bytes
            self._handle(kind, flags, number & frames.MOST_WINDOW_BYTES, data[behind:at])
        else:
            self._needed_bytes = len(frames.PREFACE) if self._is_new else frames.HEAD.size
        if at < end:
            received += memoryview(data)[at:]

    def _handle(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Handle a frame."""
        if self._begun_block is not None:
            self._continuation(kind, flags, number, payload)
        elif self._is_without_settings and (kind != frames.SETTINGS or flags & frames.ACK):
            raise Http2Error(frames.PROTOCOL, "the first frame has no settings")
        elif kind in self._handles:
            self._handles[kind](flags, number, payload)
        else:  # of an extension, or the client's frames.GOAWAY: its streams go on
            self._waste()

    def _preface(self, data: bytes) -> int:
        """Return the size of the preface, or 0 if it is not whole yet. Raises Http2Error."""
        if data[: len(frames.PREFACE)] != frames.PREFACE[: len(data)]:
            raise Http2Error(frames.PROTOCOL, "no HTTP/2")
        self._is_new = len(data) < len(frames.PREFACE)
        return 0 if self._is_new else len(frames.PREFACE)

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        if number > self._last or not number:
            raise Http2Error(frames.PROTOCOL, f"data of stream {number}, which has not begun")
        size_bytes, stream = len(payload), self._streams.get(number)
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if not payload and not flags & frames.END_STREAM:
            self._waste()
        self._credit_bytes = self._credited(0, self._credit_bytes - size_bytes)
        if stream is None:  # it is over, of which the client did not know
            return
        if stream.has_ended:
            raise Http2Error(frames.STREAM_CLOSED, f"data behind the end of stream {number}")
        if payload:
            stream.receiver.receive(payload)
        if flags & frames.END_STREAM:
            self._ended(stream)
        else:
            stream.credit_bytes = self._credited(number, stream.credit_bytes - size_bytes)

    def _credited(self, number: int, left_bytes: int) -> int:
        """Return what is left of the window of a stream, or of the connection, opened in time.

        Receivers have what came: a window is opened again once half of it is used, which is more
        than a frame. So no frame can be beyond a window.
        """
        whole_bytes = WINDOW_BYTES if number else CONNECTION_WINDOW_BYTES
        if left_bytes >= whole_bytes // 2:
            return left_bytes
        self._out.append(window(number, whole_bytes - left_bytes))
        return whole_bytes

    def _ended(self, stream: Http2Stream) -> None:
        stream.has_ended = True
        stream.receiver.ended()

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if flags & frames.PRIORITIZED:
            if len(payload) < frames.PRIORITY_BYTES:
                raise Http2Error(frames.FRAME_SIZE, "headers with half a priority")
            payload = payload[frames.PRIORITY_BYTES :]
        if flags & frames.END_HEADERS:
            self._whole_headers(flags, number, payload)
        else:
            self._begun_block = (flags, number, bytearray(payload))

    def _continuation(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        assert self._begun_block is not None
        begun_flags, begun_number, block = self._begun_block
        if kind != frames.CONTINUATION or number != begun_number:
            raise Http2Error(frames.PROTOCOL, "another frame amid headers")
        block += payload
        self._waste()
        if len(block) > MOST_HEAD_BYTES:
            raise Http2Error(frames.CALM, f"headers of more than {MOST_HEAD_BYTES} bytes")
        if flags & frames.END_HEADERS:
            self._begun_block = None
            self._whole_headers(begun_flags, number, bytes(block))

    def _whole_headers(self, flags: int, number: int, block: bytes) -> None:
        path, stream = self._paths.path(block), self._streams.get(number)
        if not number % 2:
            raise Http2Error(frames.PROTOCOL, f"a stream with the number {number}")
        if stream is not None:
            if stream.has_ended or not flags & frames.END_STREAM:
                raise Http2Error(frames.PROTOCOL, f"a second head of stream {number}")
            self._ended(stream)
        elif number <= self._last:  # trailers of a stream that is over, as above
            self._waste()
        else:
            self._last = number
            stream = self._streams[number] = Http2Stream(self, number, self._first_window_bytes)
            stream.receiver = self._begin(stream, path)
            if flags & frames.END_STREAM:
                self._ended(stream)

    def _priority(self, _: int, number: int, payload: bytes) -> None:
        if len(payload) != frames.PRIORITY_BYTES or not number:
            raise Http2Error(frames.FRAME_SIZE, "a priority")
        self._waste()

    def _reset(self, _: int, number: int, payload: bytes) -> None:
        if len(payload) != frames.NUMBER_BYTES or number > self._last or not number:
            raise Http2Error(frames.PROTOCOL, f"a reset of stream {number}")
        stream = self._streams.get(number)
        if stream is None or not stream.is_begun:
            self._waste()
        self._lose(number)

    def _lose(self, number: int) -> None:
        self._blocked.pop(number, None)
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.drop()
            stream.receiver.lost()

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % frames.SETTING.size or (flags & frames.ACK and payload):
            raise Http2Error(frames.FRAME_SIZE, "settings")
        if len(payload) > _MOST_SETTINGS * frames.SETTING.size:
            raise Http2Error(frames.CALM, f"more than {_MOST_SETTINGS} settings in a frame")
        self._is_without_settings = False
        self._waste()
        if flags & frames.ACK:
            return
        for key, value in frames.SETTING.iter_unpack(payload):
            if key == frames.INITIAL_WINDOW:
                self._resize_windows(value)
            elif key == frames.FRAME:
                if not frames.LEAST_FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES:
                    raise Http2Error(frames.PROTOCOL, f"frames of {value} bytes")
                self._frame_bytes = value
        self._out.append(frame(frames.SETTINGS, frames.ACK, 0))
        self._push_blocked()

    def _resize_windows(self, size_bytes: int) -> None:
        more_bytes = size_bytes - self._first_window_bytes
        self._first_window_bytes = size_bytes
        most_bytes = max((each.window_bytes for each in self._streams.values()), default=0)
        if max(size_bytes, most_bytes + more_bytes) > frames.MOST_WINDOW_BYTES:
            raise Http2Error(frames.FLOW_CONTROL, f"windows of {size_bytes} bytes")
        for stream in self._streams.values():
            stream.window_bytes += more_bytes

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != frames.PING_BYTES:
            raise Http2Error(frames.FRAME_SIZE, "a ping")
        self._waste()
        if not flags & frames.ACK:
            self._out.append(frame(frames.PING, frames.ACK, 0, payload))

    def _window(self, _: int, number: int, payload: bytes) -> None:
        more_bytes = int.from_bytes(payload, "big") & frames.MOST_WINDOW_BYTES
        if len(payload) != frames.NUMBER_BYTES or not more_bytes or number > self._last:
            raise Http2Error(frames.PROTOCOL, f"a window of stream {number}")
        if not number:
            self._window_bytes = _grown(self._window_bytes, more_bytes)
            self._push_blocked()
        elif number in self._streams:
            stream = self._streams[number]
            stream.window_bytes = _grown(stream.window_bytes, more_bytes)
            if stream.is_blocked:
                self.push(stream)

    def _unexpected(self, _: int, number: int, payload: bytes) -> None:
        raise Http2Error(frames.PROTOCOL, f"a frame of stream {number} with {len(payload)} bytes")

    def _waste(self) -> None:
        self._wasted += 1
        if self._wasted > MOST_WASTED:
            raise Http2Error(
                frames.CALM, f"more than {MOST_WASTED} frames or streams without a use"
            )

    # ── Sending ──────────────────────────────────────────────────────────────────────────────────

    def push(self, stream: Http2Stream) -> None:
        """Send what a stream has to send, now or once the client takes it."""
        number, unsent, out = stream.number, stream.unsent, self._out
        if self._is_held:
            self._blocked[number] = stream
            return
        if not stream.is_begun:
            stream.is_begun = True
            head = frames.NO_TABLE + self._head if self._is_first_head else self._head
            self._is_first_head = False
            out.append(frame(frames.HEADERS, frames.END_HEADERS, number, head))
        while unsent:
            data = unsent[0]
            room_bytes = min(self._window_bytes, stream.window_bytes, self._frame_bytes)
            size_bytes = min(len(data), room_bytes)
            if size_bytes <= 0:
                self._blocked[number] = stream
                return
            out += (
                frames.HEAD.pack(size_bytes >> 8, size_bytes & 0xFF, frames.DATA, 0, number),
                data,
            )
            if size_bytes < len(data):
                out[-1], unsent[0] = data[:size_bytes], data[size_bytes:]
            else:
                unsent.popleft()
            self._window_bytes -= size_bytes
            stream.window_bytes -= size_bytes
        if stream.end is not None and not stream.is_over:
            out.append(
                frame(frames.HEADERS, frames.END_STREAM | frames.END_HEADERS, number, stream.end)
            )
            stream.is_over = True
            if not stream.has_ended:  # nothing more is wanted of it
                out.append(frame(frames.RESET, 0, number, bytes(4)))
            self._streams.pop(number, None)

    def _push_blocked(self) -> None:
        blocked, self._blocked = self._blocked, {}
        while blocked:
            number = next(iter(blocked))
            self.push(blocked.pop(number))
            if self._is_held or self._window_bytes <= 0:
                break
        self._blocked = {**blocked, **self._blocked}

    def hold(self) -> None:
        """Hold what streams have to send."""
        self._is_held = True

    def release(self) -> None:
        """Send what was held."""
        self._is_held = False
        self._push_blocked()

    def ping(self) -> None:
        """Ask the client for a sign of life."""
        self._out.append(frame(frames.PING, 0, 0, _PING))

    def close(self, code: int = frames.NO_ERROR) -> None:
        """Announce the end of the connection."""
        last = self._last.to_bytes(4, "big")
        self._out.append(frame(frames.GOAWAY, 0, 0, last + code.to_bytes(4, "big")))

    def lose_all(self) -> None:
        """Cut off all streams: the connection has ended."""
        for number in list(self._streams):
            self._lose(number)

    def renew(self) -> None:
        """Begin to count wasted frames anew."""
        self._wasted = 0

    def taken(self) -> bytes:
        """Return what is to be sent, and forget it."""
        out, self._out = self._out, []
        return b"".join(out)


def _grown(window_bytes: int, more_bytes: int) -> int:
    if window_bytes + more_bytes > frames.MOST_WINDOW_BYTES:
        raise Http2Error(frames.FLOW_CONTROL, f"a window of {window_bytes + more_bytes} bytes")
    return window_bytes + more_bytes
