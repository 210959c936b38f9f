"""Connections beyond their limits, over real sockets: a clear refusal, the next one unharmed."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import pytest

from router.process.connections import HttpLimits
from router.process.serving import HttpServer, listening
from servers import eventually

LIMITS = HttpLimits(max_connections=8, header_limit_bytes=4096, max_headers=20)
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope, receive, send):
    """Reads nothing unless asked to, as a route that refuses before the body."""
    body = b""
    while scope["path"] == "/read":
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % len(body)})


class Served:
    def __init__(self, server, port):
        self.server, self.port, self.refused = server, port, []

    @asynccontextmanager
    async def connected(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def ask(self, request):
        """Everything that is answered until the server closes."""
        async with self.connected() as (reader, writer):
            writer.write(request)
            return await reader.read()

    async def refusal(self, request):
        """Status and code of the one answer."""
        head, _, body = (await self.ask(request)).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"application/json" in head
        return int(head.split()[1]), json.loads(body)["code"]

    async def is_well(self):
        async with self.connected() as (reader, writer):
            writer.write(GET)
            return (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def serving(limits):
    with listening("127.0.0.1", 0) as listener:
        served = Served(None, listener.getsockname()[1])
        served.server = HttpServer(app, limits, refused=served.refused.append)
        task = asyncio.create_task(served.server.serve([listener]))
        await eventually(served.is_well)
        try:
            yield served
        finally:
            served.server.should_exit = True
            await task


@pytest.fixture
async def served():
    async with serving(LIMITS) as served:
        yield served
        assert await served.is_well()


POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
MANY = b"".join(b"x-%d: y\r\n" % number for number in range(30))
LARGE = b"x: " + b"y" * 5000 + b"\r\n"


@pytest.mark.parametrize("headers", [MANY, LARGE])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_flood_of_headers_is_refused_whole_or_not(served, headers, is_whole):
    request = b"GET / HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n" * is_whole
    assert await served.refusal(request) == (431, "headers_too_large")
    assert served.refused == ["headers_too_large"]


async def test_a_url_that_never_ends_is_refused(served):
    assert await served.refusal(b"GET /" + b"a" * 5000) == (431, "headers_too_large")


async def test_headers_that_come_slowly_are_refused_in_the_end():
    async with serving(HttpLimits(header_timeout_s=0.2)) as served:
        async with served.connected() as (reader, writer):
            answer = asyncio.create_task(reader.read())
            for byte in GET[:-1] * 9:
                if answer.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            assert b"408" in (await answer).split(b"\r\n")[0]
        assert served.refused == ["header_timeout"]
        async with served.connected() as (reader, _):
            assert b"408" in await reader.read()  # who says nothing at all
        async with served.connected() as (reader, writer):
            writer.write(GET)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(GET[:-5])
            assert b"header_timeout" in await reader.read()  # the second request
        assert await served.is_well()


async def test_an_idle_connection_is_closed():
    async with serving(HttpLimits(keep_alive_s=0.1)) as served, served.connected() as (reader, w):
        w.write(GET)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")


async def test_a_body_that_nobody_reads_and_that_never_ends_is_closed(served):
    """Each byte of it would otherwise keep the connection alive for ever."""
    head = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
    async with served.connected() as (reader, writer):
        writer.write(head)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        closed = asyncio.create_task(reader.read())
        while not closed.done():
            writer.write(b"a")
            await asyncio.sleep(0.05)
        with suppress(ConnectionResetError):  # it may have been at the next byte
            await closed


@pytest.mark.parametrize(
    "request_",
    [
        POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5 5\r\n\r\nabcde",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost : x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\na: b\rc: d\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"garbage\r\n\r\n",
    ],
)
async def test_what_two_readers_could_read_differently_is_refused(served, request_):
    assert await served.refusal(request_) == (400, "malformed_request")
    assert served.refused == ["malformed_request"]


async def test_half_closed_connections_leave_nothing_behind(served):
    head = b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc"
    for said in (b"", GET[:9], head):
        async with served.connected() as (reader, writer):
            writer.write(said)
            writer.write_eof()
            assert await reader.read() == b""
    state = served.server.server_state
    await eventually(lambda: not state.tasks and not state.connections)
    assert served.refused == []


async def test_connections_beyond_the_limit_are_told_and_far_beyond_are_closed(served):
    idle = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(8)]
    state = served.server.server_state
    await eventually(lambda: len(state.connections) == 8)
    assert await served.refusal(GET) == (503, "too_many_connections")
    more = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(8)]
    last_reader, last_writer = await asyncio.open_connection("127.0.0.1", served.port)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await last_reader.readexactly(1)
    assert "too_many_connections" in served.refused
    for _, writer in (*idle, *more, (None, last_writer)):
        writer.close()
    await eventually(lambda: not state.connections)


async def test_a_request_after_many_on_one_connection_is_as_good_as_the_first(served):
    async with served.connected() as (reader, writer):
        for _ in range(5):
            writer.write(b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"0\r\n\r\n")
