"""gRPC on HTTP/2, driven by grpcio as clients do, and by bytes that no client sends."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import aio
from h2.connection import H2Connection

from router.forward.picker.frames import DATA, WINDOW, frame
from router.forward.picker.grpc_connection import OK, RESOURCE_EXHAUSTED, GrpcConnection
from support.processes.servers import eventually

HEAD = [(":method", "POST"), (":scheme", "http"), (":authority", "a")]


class Echo:
    """Echoes messages; `over`: how its streams ended."""

    def __init__(self, stream, over):
        self._stream, self.over = stream, over

    limit_bytes = 2_000_000

    def expects(self, size_bytes):
        assert size_bytes <= self.limit_bytes

    def received(self, message):
        if message == b"fail":
            raise RuntimeError("a bug")
        self._stream.send([message, message[:3]])

    def oversized(self):
        self._stream.finish(RESOURCE_EXHAUSTED)

    def ended(self):
        self._stream.finish(OK)
        self.over.append("ended")

    def lost(self):
        self.over.append("lost")


class Short(Echo):
    limit_bytes = 1000


class Server:
    def __init__(self):
        self.connections, self.over = set(), []

    def connection(self, most=100):
        services = {
            b"/test/Echo": lambda stream: Echo(stream, self.over),
            b"/test/Short": lambda stream: Short(stream, self.over),
        }
        return GrpcConnection(services, self.connections, most)


@asynccontextmanager
async def serving(*, options=(), **limits):
    """A server, its port, and a channel to it."""
    server = Server()
    listener = await asyncio.get_running_loop().create_server(
        lambda: server.connection(**limits), "127.0.0.1", 0
    )
    port = listener.sockets[0].getsockname()[1]
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield server, port, channel
    listener.close()
    for each in list(server.connections):
        each.close()
    await eventually(lambda: not server.connections)


async def test_messages_of_many_streams_are_answered_each_in_order():
    async def echoed(channel, number):
        call = channel.stream_stream("/test/Echo")()
        for size in range(4):
            message = bytes([number]) * size
            await call.write(message)
            assert [await call.read(), await call.read()] == [message, message[:3]]
        await call.done_writing()
        return await call.code()

    async with serving() as (server, _, channel):
        found = await asyncio.gather(*(echoed(channel, number) for number in range(100)))
        assert set(found) == {grpc.StatusCode.OK}
        assert server.over == ["ended"] * 100


@pytest.mark.parametrize("window_bytes", [16_384, 4_000_000])
async def test_long_messages_pass_whole_whatever_the_windows_of_the_client(window_bytes):
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes)]
    async with serving(options=options) as (_, _, channel):
        call = channel.stream_stream("/test/Echo")()
        message = bytes(range(256)) * 7_800
        for _ in range(3):
            await call.write(message)
            assert await call.read() == message
            assert await call.read() == message[:3]
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("path", "message", "expected"),
    [
        ("/test/Other", None, grpc.StatusCode.UNIMPLEMENTED),
        ("/test/Short", bytes(2000), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("/test/Echo", b"fail", grpc.StatusCode.INTERNAL),
    ],
)
async def test_stream_that_cannot_be_served_ends_with_a_status_and_others_go_on(
    path, message, expected
):
    async with serving() as (_, _, channel):
        other = channel.stream_stream("/test/Echo")()
        await other.write(b"begin")
        call = channel.stream_stream(path)()
        if message is not None:
            await call.write(message)
        assert await call.code() is expected
        assert [await other.read(), await other.read()] == [b"begin", b"beg"]
        await other.done_writing()
        assert await other.code() is grpc.StatusCode.OK


async def test_compressed_message_is_refused():
    async with serving() as (_, _, channel):
        call = channel.stream_stream("/test/Echo")(compression=grpc.Compression.Gzip)
        await call.write(bytes(1000))
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_cancelled_streams_and_closed_connections_are_lost():
    async with serving() as (server, _, channel):
        call = channel.stream_stream("/test/Echo")()
        await call.write(b"begin")
        await call.read()
        call.cancel()
        await eventually(lambda: server.over == ["lost"])
        other = channel.stream_stream("/test/Echo")()
        await other.write(b"begin")
        await other.read()
        for each in list(server.connections):
            each.close()
        await eventually(lambda: server.over == ["lost", "lost"])
        assert await other.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(100)])
async def test_other_protocols_are_disconnected(data):
    async with serving() as (server, port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        assert await asyncio.wait_for(_all(reader), 10)
        writer.close()
        await eventually(lambda: not server.connections)


async def test_silent_client_is_pinged_and_then_disconnected():
    async with serving() as (server, port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readexactly(9)
        (connection,) = server.connections
        for _ in range(3):  # idle, pinged, gone
            connection.check_alive()
        await eventually(lambda: not server.connections)
        assert b"kvrouter" in await _all(reader)
        writer.close()


async def test_client_that_does_not_read_is_disconnected():
    async with serving() as (server, port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        http = H2Connection()
        http.initiate_connection()
        http.update_settings({4: 2**30})
        http.send_headers(1, [*HEAD, (":path", "/test/Echo")])
        writer.write(http.data_to_send())
        await eventually(lambda: server.connections)
        (connection,) = server.connections
        window = frame(WINDOW, 0, 0, (2**14 + 8).to_bytes(4, "big"))
        message = b"\0" + (16_379).to_bytes(4, "big") + bytes(16_379)

        async def is_held():
            writer.write((frame(DATA, 0, 1, message) + window) * 60)
            await asyncio.sleep(0)
            return connection.is_held

        await eventually(is_held)
        connection.check_alive()
        assert server.connections
        connection.check_alive()
        await eventually(lambda: not server.connections)
        assert server.over == ["lost"]
        writer.close()


async def test_client_that_answers_pings_stays_connected():
    async with serving() as (server, _, channel):
        call = channel.stream_stream("/test/Echo")()
        await call.write(b"begin")
        (connection,) = server.connections
        for _ in range(6):
            connection.check_alive()
            await asyncio.sleep(0.02)
        assert [await call.read(), await call.read()] == [b"begin", b"beg"]
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


async def test_surplus_connection_is_closed():
    async with serving(most=0) as (server, port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await _all(reader) == b""
        writer.close()
        await eventually(lambda: not server.connections)


async def _all(reader):
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
