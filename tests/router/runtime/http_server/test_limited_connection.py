"""Connections beyond their limits, over real sockets: a clear refusal, the next one unharmed."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest

from router.runtime.http_server.limits import HttpLimits
from router.runtime.http_server.server import HttpServer, listening
from support.processes.servers import eventually

LIMITS = HttpLimits(max_connections=8, header_limit_bytes=4096, max_headers=20)
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope, receive, send):
    """Reads nothing unless asked to, as a route that refuses before the body; says what it read."""
    body, path = b"", scope["path"]
    if path == "/late":
        await asyncio.sleep(0.3)
    while path in ("/read", "/late", "/headers"):
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    said = b"%d" % len(body)
    if path == "/headers":
        said = b" ".join(name for name, _ in scope["headers"])
    if path == "/much":
        said = bytes(20_000_000)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": said})


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
            return (await reader.readline()).startswith(b"HTTP/1.1 200")


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


@pytest.mark.parametrize("name", ["evil.example", "EVIL.example:80", "127.0.0.1.nip.io"])
async def test_a_page_that_pretends_we_are_its_site_is_refused(name):
    """As a browser does after DNS rebinding of a name to 127.0.0.1."""
    async with serving(HttpLimits(local_names_only=True)) as served:
        asked = GET.replace(b"host: x", b"host: " + name.encode())
        assert await served.refusal(asked) == (421, "misdirected_request")
        for ours in (
            b"127.0.0.1:8",
            b"localhost",
            b"a.localhost:80",
            b"[::1]:8",
            b"10.0.0.1",
            b"box",
        ):
            asked = GET.replace(b"host: x", b"connection: close\r\nhost: " + ours)
            assert (await served.ask(asked)).startswith(b"HTTP/1.1 200")


async def test_a_url_that_never_ends_is_refused(served):
    assert await served.refusal(b"GET /" + b"a" * 5000) == (431, "headers_too_large")


async def test_headers_that_come_slowly_are_refused_in_the_end():
    async with serving(HttpLimits(header_timeout_s=0.2)) as served:
        async with served.connected() as (reader, writer):
            # Its first line alone: a byte that is sent after the end resets the connection.
            answer = asyncio.create_task(reader.readuntil(b"\r\n"))
            for byte in GET[:-1] * 9:
                if answer.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            assert b"408" in await answer
        assert set(served.refused) == {"header_timeout"}
        async with served.connected() as (reader, _):
            assert b"408" in await reader.read()  # a client that sends nothing
        async with served.connected() as (reader, writer):
            writer.write(GET)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(GET[:-5])
            assert b"header_timeout" in await reader.read()  # the second request
        await eventually(served.is_well)  # once it is asked quickly enough


async def test_an_idle_connection_is_closed():
    async with serving(HttpLimits(keep_alive_s=0.1)) as served, served.connected() as (reader, w):
        w.write(GET)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")


async def test_answer_before_the_body_keeps_the_connection(served):
    refused = POST + b"content-length: 2\r\n\r\n"
    async with served.connected() as (reader, writer), served.connected() as (late, other):
        for here, there in ((reader, writer), (late, other)):
            there.write(refused)
            await here.readuntil(b"\r\n0\r\n\r\n")
        writer.write(b"{}")
        assert await late.read() == b""  # its body did not come in time
        writer.write(GET)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_unread_endless_body_closes_the_connection(served):
    """Each byte of it would otherwise keep the connection alive for ever."""
    head = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
    async with served.connected() as (reader, writer):
        writer.write(head)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        closed = asyncio.create_task(reader.read())
        await eventually(lambda: writer.write(b"a") or closed.done(), poll_s=0.05)
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
        b"POST / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"garbage\r\n\r\n",
    ],
)
async def test_ambiguous_requests_are_refused(served, request_):
    assert await served.refusal(request_) == (400, "malformed_request")
    assert served.refused == ["malformed_request"]


UPGRADE = POST.replace(b"/ ", b"/read ") + b"connection: upgrade\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"content-length: %d\r\n\r\n" % len(GET), GET),
        (b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(GET), GET)),
    ],
)
@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_body_is_no_request_whatever_protocol_is_asked_for(served, head, body, pieces):
    whole = UPGRADE + head + body + GET * (pieces == 1)
    async with served.connected() as (reader, writer):
        cut = [len(whole) * n // pieces for n in range(pieces)] + [len(whole)]
        if pieces == 2:
            cut[1] = len(UPGRADE + head)
        for start, end in pairwise(cut):
            writer.write(whole[start:end])
            await asyncio.sleep(0.002 * (pieces > 1))
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"%d\r\n0\r\n\r\n" % len(GET) in answer


async def test_upgrade_request_is_answered_over_http_1(served):
    request = (
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    )
    assert (await served.ask(request)).startswith(b"HTTP/1.1 200")


CHUNKED = POST.replace(b"/ ", b"/read ") + b"transfer-encoding: chunked\r\nx-a: 1\r\n\r\n"


async def test_trailers_are_no_headers(served):
    request = (
        CHUNKED.replace(b"/read", b"/headers") + b"3\r\nabc\r\n0\r\nx-b: 1\r\ncookie: x\r\n\r\n"
    )
    async with served.connected() as (reader, writer):
        for _ in range(2):
            writer.write(request)
            await reader.readuntil(b"\r\n\r\n")
            said = await reader.readuntil(b"0\r\n\r\n")
            assert said.split(b"\r\n")[1] == b"host transfer-encoding x-a"


@pytest.mark.parametrize("barren", [b"0\r\nx: ", b"0\r\n" + b"x: y\r\n" * 9, b"5;x="])
async def test_trailers_and_chunk_extensions_are_bounded_like_a_head(served, barren):
    more = b"x: " + b"y" * 400 + b"\r\n" if b"y" in barren else b"y" * 400
    async with served.connected() as (_, writer):
        writer.write(CHUNKED + b"3\r\nabc\r\n" + barren)
        await eventually(lambda: writer.write(more) or served.refused, poll_s=0.01)
    assert served.refused == ["headers_too_large"]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_half_closed_client_still_gets_its_response(served, version):
    late = b"POST /late HTTP/%b\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc" % version
    async with served.connected() as (reader, writer):
        writer.write(late * (2 if version == b"1.1" else 1))
        writer.write_eof()
        answer = (await reader.read()).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert answer.count(b"HTTP/1.1 200") == (2 if version == b"1.1" else 1)
    state = served.server.server_state
    await eventually(lambda: not state.tasks and not state.connections)


async def test_client_that_does_not_read_is_disconnected():
    async with serving(HttpLimits(keep_alive_s=0.1, stuck_s=0.2)) as served:
        state = served.server.server_state
        async with served.connected() as (reader, writer):
            writer.write(b"GET /much HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r")
            await eventually(lambda: not state.connections and not state.tasks)
        assert await served.is_well()


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


async def test_connections_beyond_the_limit_are_refused_and_far_beyond_closed(served):
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
