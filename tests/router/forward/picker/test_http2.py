"""The server's side of HTTP/2, against the library h2 as its client, and by bytes of no client."""

from itertools import pairwise

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, StreamEnded
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from router.forward.picker import http2
from router.forward.picker.frames import (
    CALM,
    COMPRESSION,
    FLOW_CONTROL,
    FRAME_SIZE,
    PREFACE,
    PROTOCOL,
    STATUS_200,
    STREAM_CLOSED,
    Http2Error,
    frame,
    literal,
)
from router.forward.picker.http2 import Http2Connection

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
HEAD = STATUS_200 + literal(b"content-type", b"application/grpc")
END = literal(b"grpc-status", b"0")
PATH = b"\x83\x04\x02/p"  # :method POST, :path /p
REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/p"), (":authority", "a")]


class Recorder:
    """Echoes what it receives if `echoes`, and ends with the client."""

    def __init__(self, stream, path, *, echoes):
        self.stream, self.path, self.echoes = stream, path, echoes
        self.over = []

    def receive(self, data):
        if self.echoes:
            self.stream.send(data)

    def ended(self):
        self.over.append("ended")
        if self.echoes:
            self.stream.finish(END)

    def lost(self):
        self.over.append("lost")


class Server:
    def __init__(self, *, echoes=True):
        self.streams = {}
        self.echoes = echoes
        self.http = Http2Connection(self._begin, HEAD)

    def _begin(self, stream, path):
        recorder = self.streams[stream.number] = Recorder(stream, path, echoes=self.echoes)
        return recorder

    def feed(self, *frames):
        """What it sends for frames of a client that has sent its preface and settings."""
        self.http.receive(PREFACE + frame(SETTINGS, 0, 0) + b"".join(frames))
        return self.http.taken()


def client(**options):
    http = H2Connection(H2Configuration(**options))
    http.initiate_connection()
    return http


def exchange(server, http, cuts=()):
    """Pass bytes between both until nothing is left. Returns the client's events."""
    events = []
    while data := http.data_to_send():
        places = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
        for start, end in pairwise(places):
            server.http.receive(data[start:end])
        events += http.receive_data(server.http.taken())
    return events


@given(
    st.lists(st.binary(max_size=40_000), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**20), max_size=4),
    st.sampled_from([1, 100, 65_535, 2**20]),
    st.sampled_from([2**14, 2**17]),
)
def test_bodies_pass_whole_however_bytes_and_windows_cut_them(bodies, cuts, window, most):
    server, http = Server(), client()
    http.update_settings({4: window if window > 1 else 4096, 5: most})
    found = {}
    numbers = range(1, 2 * len(bodies), 2)
    for number, body in zip(numbers, bodies, strict=True):
        http.send_headers(number, REQUEST)
        for start in range(0, len(body), 16_384):
            http.send_data(number, body[start : start + 16_384])
        http.end_stream(number)
    for _ in range(1000):
        for event in exchange(server, http, cuts):
            if isinstance(event, DataReceived):
                found[event.stream_id] = found.get(event.stream_id, b"") + event.data
                http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                numbers = [each for each in numbers if each != event.stream_id]
        if not numbers:
            break
    assert [found.get(1 + 2 * each, b"") for each in range(len(bodies))] == bodies
    assert all(each.over == ["ended"] and each.path == b"/p" for each in server.streams.values())


@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.sampled_from("abc"), st.text("xyz", max_size=9), st.booleans()),
                max_size=5,
            ),
            st.text("pq", max_size=2),
            st.none() | st.integers(0, 200),
        ),
        max_size=20,
    )
)
def test_paths_are_right_whatever_the_table_of_headers_went_through(heads):
    server, encoder = Server(echoes=False), Encoder()
    server.feed()
    for number, (more, path, table_bytes) in enumerate(heads):
        if table_bytes is not None:
            encoder.header_table_size = table_bytes
        pairs = [(name, value, is_secret) for name, value, is_secret in more]
        block = encoder.encode([*pairs, (":path", f"/{path}")])
        server.http.receive(frame(HEADERS, 0x4, 2 * number + 1, block))
        assert server.streams[2 * number + 1].path == b"/" + path.encode()


@pytest.mark.parametrize(
    ("code", "frames"),
    [
        (FRAME_SIZE, [b"\xff\xff\xff\0\0" + bytes(4)]),
        (PROTOCOL, [frame(DATA, 0, 0, b"a")]),
        (PROTOCOL, [frame(DATA, 0, 1, b"a")]),
        (PROTOCOL, [frame(HEADERS, 0x4, 0, PATH)]),
        (PROTOCOL, [frame(HEADERS, 0x4, 2, PATH)]),
        (PROTOCOL, [frame(HEADERS, 0x4, 1, PATH), frame(HEADERS, 0x4, 1, PATH)]),
        (PROTOCOL, [frame(HEADERS, 0x5, 1, PATH), frame(HEADERS, 0x5, 1, PATH)]),
        (STREAM_CLOSED, [frame(HEADERS, 0x5, 1, PATH), frame(DATA, 0, 1, b"a")]),
        (PROTOCOL, [frame(HEADERS, 0x4, 1, PATH), frame(DATA, 0x8, 1, b"\x05abcd")]),
        (PROTOCOL, [frame(HEADERS, 0xC, 1, b"")]),
        (FRAME_SIZE, [frame(HEADERS, 0x24, 1, b"abcd")]),
        (COMPRESSION, [frame(HEADERS, 0x4, 1, b"\xff\xff\xff")]),
        (COMPRESSION, [frame(HEADERS, 0x4, 1, b"\x80")]),
        (CALM, [frame(HEADERS, 0x4, 1, b"\x40\x7f\xa1\x1e" + bytes(4000) + b"\0" + 99 * b"\xbe")]),
        (PROTOCOL, [frame(HEADERS, 0, 1, PATH), frame(PING, 0, 0, bytes(8))]),
        (PROTOCOL, [frame(HEADERS, 0, 1, PATH), frame(CONTINUATION, 0x4, 3)]),
        (CALM, [frame(HEADERS, 0, 1, PATH), *[frame(CONTINUATION, 0, 1, bytes(16_384))] * 4]),
        (PROTOCOL, [frame(CONTINUATION, 0x4, 1, PATH)]),
        (PROTOCOL, [frame(PUSH, 0x4, 1, bytes(8))]),
        (FRAME_SIZE, [frame(PRIORITY, 0, 1, bytes(4))]),
        (PROTOCOL, [frame(RESET, 0, 1, bytes(4))]),
        (PROTOCOL, [frame(HEADERS, 0x4, 1, PATH), frame(RESET, 0, 1, bytes(3))]),
        (FRAME_SIZE, [frame(SETTINGS, 0, 0, bytes(5))]),
        (FRAME_SIZE, [frame(SETTINGS, 0, 1)]),
        (FRAME_SIZE, [frame(SETTINGS, 1, 0, bytes(6))]),
        (CALM, [frame(SETTINGS, 0, 0, bytes(6 * 65))]),
        (PROTOCOL, [frame(SETTINGS, 0, 0, b"\0\x05" + (2**14 - 1).to_bytes(4, "big"))]),
        (FLOW_CONTROL, [frame(SETTINGS, 0, 0, b"\0\x04\x80\0\0\0")]),
        (FRAME_SIZE, [frame(PING, 0, 0, bytes(7))]),
        (PROTOCOL, [frame(WINDOW, 0, 0, bytes(4))]),
        (PROTOCOL, [frame(WINDOW, 0, 1, b"\0\0\0\1")]),
        (FLOW_CONTROL, [frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff")]),
        (
            FLOW_CONTROL,
            [frame(HEADERS, 0x4, 1, PATH), frame(WINDOW, 0, 1, b"\x7f\xff\xff\xff")],
        ),
    ],
)
def test_violation_ends_the_connection_with_its_code(code, frames):
    server = Server(echoes=False)
    with pytest.raises(Http2Error) as raised:
        server.feed(*frames)
    assert raised.value.code == code


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1", b"\x16\x03\x01", PREFACE + frame(PING, 0, 0)])
def test_connection_that_begins_otherwise_is_refused_at_once(data):
    with pytest.raises(Http2Error):
        Server().http.receive(data)


def test_windows_open_again_as_bodies_are_read():
    server, http = Server(echoes=False), client()
    http.send_headers(1, REQUEST)
    exchange(server, http)
    sizes = [http2.CONNECTION_WINDOW_BYTES, http2.WINDOW_BYTES]
    for _ in range(2 * http2.CONNECTION_WINDOW_BYTES // 2**14):
        server.http.receive(frame(DATA, 0, 1, bytes(2**14)))
        sizes = [each - 2**14 for each in sizes]
        for event in http.receive_data(server.http.taken()):
            sizes[event.stream_id != 0] += event.delta
        assert sizes[0] >= http2.CONNECTION_WINDOW_BYTES // 2
        assert sizes[1] >= http2.WINDOW_BYTES // 2


def _resets(numbers):
    return [
        part
        for number in numbers
        for part in (frame(HEADERS, 0x4, number, PATH), frame(RESET, 0, number, bytes(4)))
    ]


@pytest.mark.parametrize(
    "flood",
    [
        [frame(PING, 0, 0, bytes(8))],
        [frame(SETTINGS, 0, 0)],
        [frame(SETTINGS, 1, 0)],
        [frame(PRIORITY, 0, 1, bytes(5))],
        [frame(DATA, 0, 1)],
        [frame(DATA, 0x8, 1, b"\3abc")],
        [frame(HEADERS, 0, 1), *[frame(CONTINUATION, 0, 1)] * http2.MOST_WASTED],
        [frame(99, 0, 0)],
        [frame(GOAWAY, 0, 0, bytes(8))],
        _resets(range(3, 2 * http2.MOST_WASTED + 9, 2)),
    ],
)
def test_flood_of_frames_without_a_use_ends_the_connection(flood):
    server = Server(echoes=False)
    begin = frame(HEADERS, 0x4, 1, PATH)
    if flood[0][3] == HEADERS:
        begin = b""
    server.feed(begin)
    with pytest.raises(Http2Error) as raised:
        server.http.receive(b"".join(flood * (http2.MOST_WASTED // len(flood) + 1)))
    assert raised.value.code == CALM


def test_limit_of_frames_without_a_use_is_renewed():
    server = Server()
    server.feed()
    for _ in range(3):
        server.http.receive(frame(PING, 0, 0, bytes(8)) * (http2.MOST_WASTED - 1))
        server.http.renew()
        assert len(server.http.taken()) == 17 * (http2.MOST_WASTED - 1)


def test_streams_that_are_reset_behind_an_answer_are_no_waste():
    server = Server()
    server.feed()
    for number in range(1, 2 * http2.MOST_WASTED + 9, 2):
        head, data = frame(HEADERS, 0x4, number, PATH), frame(DATA, 0, number, b"a")
        server.http.receive(head + data + frame(RESET, 0, number, bytes(4)))
        server.http.taken()
    assert {tuple(each.over) for each in server.streams.values()} == {("lost",)}


def test_frames_of_streams_that_are_over_are_ignored_and_counted_in_the_window():
    server, http = Server(echoes=False), client()
    http.send_headers(1, REQUEST)
    exchange(server, http)
    server.streams[1].stream.finish(END)
    late = [frame(DATA, 0, 1, bytes(2**14)), frame(WINDOW, 0, 1, b"\0\0\0\1")]
    server.http.receive(b"".join(late * 640) + frame(RESET, 0, 1, bytes(4)))
    sent = server.http.taken()
    assert frame(WINDOW, 0, 0, (513 * 2**14).to_bytes(4, "big")) in sent
    assert server.streams[1].over == []


def test_resized_windows_hold_and_release_what_is_sent():
    server, http = Server(), client()
    http.update_settings({4: 10})
    http.send_headers(1, REQUEST)
    http.send_data(1, b"abcdefghijklmnop", end_stream=True)
    (first,) = [e for e in exchange(server, http) if isinstance(e, DataReceived)]
    assert first.data == b"abcdefghij"
    http.update_settings({4: 0})
    assert not [e for e in exchange(server, http) if isinstance(e, DataReceived)]
    http.update_settings({4: 14})
    (second,) = [e for e in exchange(server, http) if isinstance(e, DataReceived)]
    assert second.data == b"klmn"
    http.increment_flow_control_window(100, 1)
    events = exchange(server, http)
    assert [e.data for e in events if isinstance(e, DataReceived)] == [b"op"]
    assert any(isinstance(e, StreamEnded) for e in events)


def test_held_streams_send_nothing_until_they_are_released():
    server, http = Server(), client()
    exchange(server, http)
    server.http.hold()
    http.send_headers(1, REQUEST)
    http.send_data(1, b"a", end_stream=True)
    http.ping(bytes(8))
    assert not [e for e in exchange(server, http) if isinstance(e, DataReceived)]
    server.http.release()
    events = http.receive_data(server.http.taken())
    assert [e.data for e in events if isinstance(e, DataReceived)] == [b"a"]


def test_closed_connection_says_so_and_cuts_off_its_streams():
    server, http = Server(), client()
    http.send_headers(1, REQUEST)
    exchange(server, http)
    server.http.close(CALM)
    (event,) = http.receive_data(server.http.taken())
    assert isinstance(event, ConnectionTerminated)
    assert (event.last_stream_id, event.error_code) == (1, CALM)
    server.http.lose_all()
    assert server.streams[1].over == ["lost"]
