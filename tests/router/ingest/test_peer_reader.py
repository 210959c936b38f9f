"""Streams that are none, end, or say nothing: the reason, and the state of their router."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec import msgpack

from router.config.discovery import PeerConfig
from router.ingest.peer_reader import PeerReader, StreamEndError
from router.ingest.peer_streams import Kind, encode_record
from router.protocol.replicas import PeerGreeting
from router.runtime.http_client.pool import Origin
from router.runtime.security.config import SecurityConfig
from support.processes.listening import listening

OURS = PeerGreeting(1, 7, "one", "test", "public")
GREETING = encode_record(Kind.GREETING, msgpack.encode(OURS))
FRAME = encode_record(Kind.FRAME, b"frame")


def response(body, status="200 OK"):
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


@asynccontextmanager
async def answering(answer, *, ends=True):
    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        writer.write(answer)
        with suppress(ConnectionError):
            if not ends:
                await reader.read()  # until the other side closes
            writer.close()
            await writer.wait_closed()
        closed.set()

    closed = asyncio.Event()
    async with listening(serve) as port:
        yield Origin.of(f"http://127.0.0.1:{port}")
        await closed.wait()


async def read(origin):
    """How a stream ends, and what was in it."""
    found = []
    reader = PeerReader(PeerConfig(router_peers="a:1"), SecurityConfig(), OURS)
    with pytest.raises(StreamEndError) as end:
        await reader.read(origin, found.append, lambda *record: found.append(record))
    return (end.value.state, end.value.problem), found


async def test_messages_of_a_stream_are_taken_behind_its_greeting():
    async with answering(response(GREETING + FRAME + FRAME)) as origin:
        end, found = await read(origin)
    assert found == [OURS, (Kind.FRAME, b"frame"), (Kind.FRAME, b"frame")]
    assert end == ("unreachable", "it has ended its stream")


@pytest.mark.parametrize(
    ("answer", "state", "problem"),
    [
        (response(FRAME), "refused", "its stream cannot be read: a greeting belongs at the"),
        (response(GREETING * 2), "refused", "its stream cannot be read: a greeting belongs at"),
        (response(b"<html>...</html>"), "refused", "its stream cannot be read: a record of kind"),
        (response(encode_record(Kind.GREETING, b"x")), "refused", "its stream cannot be read:"),
        (response(b"not here", "404 Not Found"), "refused", "404"),
        (response(b'{"error": "no"}', "403 Forbidden"), "refused", "403: no"),
        (response(b'{"error": "late"}', "503 Busy"), "unreachable", "503: late"),
        (response(b'{"error": "", "code": "peer_itself"}', "409 Conflict"), "itself", None),
        (response(GREETING)[:-1], "unreachable", "cut off"),
        (b"", "unreachable", "closed"),
    ],
)
async def test_the_end_of_a_stream_says_why(answer, state, problem):
    async with answering(answer) as origin:
        (found, reason), _ = await read(origin)
    assert found == state
    assert (reason or "").startswith(problem or "")


async def test_a_stream_without_heartbeats_is_given_up(monkeypatch):
    monkeypatch.setattr("router.ingest.peer_reader.SILENT_S", 0.05)
    async with answering(response(GREETING + FRAME)[:-1], ends=False) as origin:
        end, found = await read(origin)
    assert end == ("unreachable", "timeout: no answer in time")
    assert found == [OURS]


async def test_a_token_that_cannot_be_read_is_named():
    config = PeerConfig(router_peers="a:1", router_peers_token_file="/nowhere")
    reader = PeerReader(config, SecurityConfig(), OURS)
    with pytest.raises(StreamEndError, match="router_peers_token_file: /nowhere: No such file"):
        await reader.read(Origin.of("http://127.0.0.1:1"), print, print)
