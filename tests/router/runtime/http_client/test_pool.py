"""Connections to servers that behave, and to others."""

import asyncio
import socket
import ssl
import threading
from contextlib import asynccontextmanager, suppress

import pytest

from router.errors import InvalidFieldError
from router.runtime.http_client import (
    HttpPool,
    NeverSentError,
    Origin,
    PoolLimits,
    Request,
    UpstreamError,
)
from router.runtime.http_client.connection import MOST_UNREAD_BYTES
from support.engines.upstreams import (
    STREAM_END,
    STREAM_HEAD,
    Upstream,
    chunk,
    hangs,
    hangs_up,
    response,
    says,
)
from support.processes.certificates import Authority
from support.processes.listening import listening
from support.processes.servers import eventually, free_port, until_still

SOCKET_BUFFERS_BYTES = 32 << 20
"""More than two sockets hold between them."""
ASK = Request("POST", "/x", b"body", ((b"x-a", b"1"),))

REPEATABLE = Request("GET", "/x", is_repeatable=True)


@pytest.fixture
async def pool():
    pool = HttpPool(PoolLimits(connect_timeout_s=30, head_timeout_s=60))
    yield pool
    pool.close()


async def ask(pool, upstream, request=ASK, timeout_s=60.0):
    async with pool.response(Origin.of(upstream.url), request, timeout_s) as answer:
        return answer.status, await answer.read(1 << 20, timeout_s)


async def failure(pool, script, timeout_s=60.0):
    async with Upstream(script).running() as upstream:
        with pytest.raises(UpstreamError) as caught:
            await ask(pool, upstream, timeout_s=timeout_s)
    assert pool.open_connections == 0
    return caught.value.problem


async def test_one_lookup_of_a_name_serves_all_requests_while_it_lasts(monkeypatch):
    may_end, lookups, found = threading.Event(), [], socket.getaddrinfo

    def look_up(host, *arguments):
        lookups.append(host)
        may_end.wait(300.0)
        return found("127.0.0.1", *arguments)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    pool = HttpPool(PoolLimits(connect_timeout_s=0.02))
    async with Upstream(says(response(b"ok"), then_close=True)).running() as upstream:
        origin = Origin.of(upstream.url.replace("127.0.0.1", "engine"))
        for _ in range(3):
            with pytest.raises(NeverSentError, match="connect timeout"):
                await asyncio.gather(*(pool.send(origin, ASK) for _ in range(10)))
        assert lookups == ["engine"]
        may_end.set()

        async def is_answered():
            with suppress(NeverSentError):
                async with pool.response(origin, ASK) as answer:
                    return answer.status == 200

        await eventually(is_answered)
    pool.close()


async def test_a_repeated_head_is_read_with_its_own_id_and_body(pool):
    """Also where its body comes later."""

    async def script(upstream, writer):
        number = len(upstream.requests)
        body = b"b" * number
        head = b"HTTP/1.1 200 OK\r\nx-request-id: %d\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % (number, len(body)) + body[: number - (number > 3)])
        if number > 3:
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(b"b")

    async with Upstream(script).running() as upstream:
        for number in range(1, 6):
            async with pool.response(Origin.of(upstream.url), ASK) as answer:
                assert answer.headers == ((b"x-request-id", b"%d" % number),)
                assert await answer.read(1 << 20, 60.0) == b"b" * number
        assert upstream.connections == 1


async def test_a_connection_is_kept_and_used_again(pool):
    async with Upstream(says(response(b"hello"))).running() as upstream:
        for _ in range(3):
            assert await ask(pool, upstream) == (200, b"hello")
        assert upstream.connections == 1
        head, body = upstream.requests[0]
        assert head.split("\r\n")[:3] == [
            "POST /x HTTP/1.1",
            f"host: 127.0.0.1:{upstream.port}",
            "x-a: 1",
        ]
        assert body == b"body"


async def test_chunked_bodies_and_heads_that_announce_others(pool):
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    script = says(early + STREAM_HEAD + chunk(b"ab"), chunk(b"cd") + STREAM_END)
    async with Upstream(script).running() as upstream:
        assert await ask(pool, upstream) == (200, b"abcd")
        assert await ask(pool, upstream) == (200, b"abcd")
        assert upstream.connections == 1


async def test_a_body_may_end_with_the_connection(pool):
    script = says(b"HTTP/1.1 200 OK\r\n\r\nall of it", then_close=True)
    async with Upstream(script).running() as upstream:
        assert await ask(pool, upstream) == (200, b"all of it")
        assert await ask(pool, upstream) == (200, b"all of it")
        assert upstream.connections == 2


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (hangs_up, "closed"),
        (says(response(b"abc", length=9), then_close=True), "cut off"),
        (says(STREAM_HEAD + chunk(b"abc"), then_close=True), "cut off"),
        (says(b"HTTP/1.1 200", then_close=True), "cut off"),
        (says(b"SSH-2.0-OpenSSH_9.6\r\n"), "malformed"),
        (says(response(b"{}", "200 OK", "content-length: 5")), "malformed"),
        (says(response(b"hello", "000 X") + response(b"")), "malformed"),
        (says(response(b"{}", "200 OK", "transfer-encoding: chunked")), "malformed"),
        (says(response(b"{}", "099 Early")), "malformed"),
        (says(STREAM_HEAD + b"zz\r\n"), "malformed"),
        (says(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000), "too large"),
        (says(response(b"z" * (1 << 20) + b"z", length=1 << 21)), "too large"),
    ],
)
async def test_invalid_response_raises_its_problem(pool, script, problem):
    assert await failure(pool, script) == problem


def goes_on(*pieces, again):
    """A script that says these, and then something for ever that is no body."""

    async def script(_, writer):
        writer.write(b"".join(pieces))
        while True:
            writer.write(again)
            await writer.drain()
            await asyncio.sleep(0)

    return script


@pytest.mark.parametrize(
    "script",
    [
        hangs,
        says(response(b"abc", length=9)),
        goes_on(STREAM_HEAD, chunk(b"abc"), b"0\r\n", again=b"x: y\r\n"),
        goes_on(STREAM_HEAD, b"5;x=", again=b"y"),
    ],
)
async def test_timeout_raises(pool, script):
    async with asyncio.timeout(60):
        assert await failure(pool, script, timeout_s=0.2) == "timeout"


async def test_bytes_after_a_body_are_no_header(pool):
    script = says(STREAM_HEAD, chunk(b"abc"), b"0\r\nx-late: 1\r\n\r\n")
    async with Upstream(script).running() as upstream:
        async with pool.response(Origin.of(upstream.url), ASK) as answer:
            assert await answer.read(9, 60) == b"abc"
            assert answer.header(b"x-late") is None
        assert pool.open_connections == 1


async def test_early_response_closes_the_connection(pool):
    is_asked, is_gone = asyncio.Event(), asyncio.Event()

    async def answers_at_once(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response(b"too large", "413 Content Too Large"))
        await is_asked.wait()
        writer.transport.abort()
        is_gone.set()

    async with listening(answers_at_once) as port:
        at = Origin.of(f"http://127.0.0.1:{port}")
        async with pool.response(at, Request("POST", "/x", bytes(32 << 20))) as answer:
            assert (answer.status, await answer.read(9, 60)) == (413, b"too large")
        assert pool.open_connections == 0
        is_asked.set()
        await is_gone.wait()


async def test_refused_connection_is_never_sent(pool):
    with pytest.raises(NeverSentError) as caught:
        async with pool.response(Origin.of(f"http://127.0.0.1:{free_port()}"), ASK):
            pass
    assert caught.value.problem == "refused"


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\n", response(b"evil"), b"?"])
async def test_unrequested_bytes_are_no_response(pool, more):
    for pieces in ([response(b"a") + more], [response(b"a"), more]):
        async with Upstream(says(*pieces)).running() as upstream:
            for _ in range(20):
                assert await ask(pool, upstream, REPEATABLE) == (200, b"a")


async def test_a_kept_connection_that_was_closed_meanwhile_is_replaced(pool):
    script = says(response(b"a"), then_close=True)
    async with Upstream(script).running() as upstream:
        for _ in range(20):
            assert await ask(pool, upstream, REPEATABLE) == (200, b"a")


async def test_unread_response_closes_the_connection(pool):
    async with Upstream(says(STREAM_HEAD + chunk(b"abc"))).running() as upstream:
        async with pool.response(Origin.of(upstream.url), ASK) as answer:
            assert await anext(answer.chunks(60)) == b"abc"
        await eventually(lambda: upstream.gone == 1)
    assert pool.open_connections == 0


async def test_cancellation_closes_the_connection(pool):
    async with Upstream(hangs).running() as upstream:
        asking = asyncio.create_task(ask(pool, upstream))
        await eventually(lambda: upstream.requests)
        asking.cancel()
        await asyncio.wait((asking,))
        await eventually(lambda: upstream.gone == 1)
    assert pool.open_connections == 0


async def test_unread_response_pauses_reading(pool):
    written = []

    async def floods(_, writer):
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(b"z" * 65_536))
            await writer.drain()
            written.append(65_536)

    async with (
        Upstream(floods).running() as upstream,
        pool.response(Origin.of(upstream.url), ASK) as answer,
    ):
        chunks = answer.chunks(60)
        await anext(chunks)
        before = await until_still(lambda: sum(written))  # the server waits, too
        assert before < SOCKET_BUFFERS_BYTES + 2 * MOST_UNREAD_BYTES
        while sum(written) == before:
            await anext(chunks)


async def test_connections_to_a_server_are_bounded():
    pool = HttpPool(PoolLimits(max_connections=1))
    async with Upstream(says(response())).running() as upstream:
        async with pool.response(Origin.of(upstream.url), ASK):
            with pytest.raises(NeverSentError, match="busy"):
                await ask(pool, upstream)
        assert (await ask(pool, upstream))[0] == 200
    pool.close()


async def test_old_connections_are_closed():
    pool = HttpPool(PoolLimits(idle_s=0.0))
    async with Upstream(says(response())).running() as upstream:
        await ask(pool, upstream)
        assert pool.open_connections == 1
        pool.close_old()
        assert pool.open_connections == 0
        await eventually(lambda: upstream.gone == 1)


async def test_plain_http_is_no_tls(pool):
    context = ssl.create_default_context()
    async with Upstream(says(response())).running() as upstream:
        pool = HttpPool(PoolLimits(), context)
        with pytest.raises(NeverSentError):
            async with pool.response(Origin.of(upstream.url.replace("http", "https")), ASK):
                pass


@asynccontextmanager
async def tls_server(authority):
    """A server that closes each connection after an answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with listening(serve, ssl=context) as port:
        yield f"https://127.0.0.1:{port}"


async def test_authorities_are_read_once_for_all_connections_until_they_change(
    tmp_path, monkeypatch
):
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    chosen = tmp_path / "chosen.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(chosen))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))
    chosen.write_bytes(authority.path.read_bytes())
    async with tls_server(authority) as url:
        pool = HttpPool(PoolLimits(connect_timeout_s=30, head_timeout_s=60))

        async def status():
            async with pool.response(Origin.of(url), REPEATABLE) as answer:
                return answer.status

        assert await status() == 200
        chosen.unlink()
        assert await status() == 200
        chosen.write_bytes(stranger.path.read_bytes())
        with pytest.raises(NeverSentError, match="CERTIFICATE_VERIFY_FAILED"):
            await status()
        chosen.write_bytes(authority.path.read_bytes())
        assert await status() == 200


@pytest.mark.parametrize(
    ("url", "authority", "prefix"),
    [
        ("http://a", "a", ""),
        ("http://a:80/b/", "a", "/b"),
        ("https://a:80", "a:80", ""),
        ("http://[::1]:8000/x", "[::1]:8000", "/x"),
    ],
)
def test_origins(url, authority, prefix):
    origin = Origin.of(url)
    assert (origin.authority, origin.prefix) == (authority, prefix)


@pytest.mark.parametrize(
    "url", ["", "a:1", "ftp://a", "http://", "http://a b", "http://a:x", "http://a\n"]
)
def test_invalid_server_url_is_refused(url):
    with pytest.raises(InvalidFieldError):
        Origin.of(url)


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\rb"])
def test_no_header_can_become_two(value):
    with pytest.raises(InvalidFieldError):
        Request("GET", "/", headers=((b"x", value),)).encoded(Origin.of("http://a"))
