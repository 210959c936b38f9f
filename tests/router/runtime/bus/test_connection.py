"""The connection: patient at the start, and back by itself."""

import asyncio
import logging

import pytest
import uvloop
from nats.errors import (
    BadSubjectError,
    ConnectionClosedError,
    MaxPayloadError,
    OutboundBufferLimitError,
)

from router.protocol.subjects import Subjects
from router.runtime.bus import connection as module
from router.runtime.bus.connection import (
    SAID_AGAIN,
    StreamLimits,
    connection,
    ensure_bucket,
    ensure_event_stream,
    translated,
    until_closed,
)
from router.runtime.bus.errors import BusUnavailableError
from router.runtime.security.nats_access import NatsAccess
from support.processes.listening import listening
from support.processes.servers import free_port

SUBJECTS = Subjects("test")


async def test_missing_server_is_awaited_and_logged(stopped_nats_server, eventually, caplog):
    server, seen = stopped_nats_server, []

    async def connect():
        async with connection(server.url, "test", seen.append) as bus:
            await bus.client.flush()

    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(connect())
        await eventually(lambda: f"no NATS at {server.url} yet" in caplog.text)
    assert "[Errno 111]" in caplog.text
    assert seen == []
    server.start()
    await task
    assert seen == [True, False]


async def test_repeated_reason_is_logged_at_intervals(monkeypatch, eventually, caplog):
    monkeypatch.setattr("router.runtime.bus.connection.RETRY_S", 0.0)
    attempts = []

    class Counted(NatsAccess, frozen=True):
        def options(self, url):
            attempts.append(url)
            return {}

    async def connect():
        async with connection(f"nats://127.0.0.1:{free_port()}", "test", print, Counted()):
            pass

    task = asyncio.create_task(connect())
    await eventually(lambda: caplog.text.count("no NATS at") >= 3)
    assert len(attempts) > 2 * SAID_AGAIN
    task.cancel()
    await asyncio.wait([task])


async def test_loss_and_return_of_the_connection_are_reported(nats_server, eventually):
    seen = []
    async with connection(nats_server.url, "test", seen.append):
        nats_server.kill()
        await eventually(lambda: seen == [True, False])
        nats_server.start()
        await eventually(lambda: seen == [True, False, True])


def test_lost_connection_is_closed_with_pending_messages(nats_server, eventually):
    """On uvloop, as processes run: it minds what is written to a connection that is closed."""

    async def leave():
        async with connection(nats_server.url, "test", lambda _: None) as bus:
            nats_server.kill()
            await eventually(lambda: isinstance(bus.problem, OSError))  # of connecting again
            await bus.client.publish("anybody", b"are you there?")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(leave())


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_server_that_does_not_greet_is_left_again(
    nats_server, eventually, monkeypatch, is_first
):
    """However often: no connection to it stays open."""
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    met, left, seen = [], [], []

    async def never_greet(reader, writer):
        met.append(writer)
        await reader.read()
        left.append(writer)
        writer.close()

    async def stay():
        async with connection(nats_server.url, "test", seen.append):
            await asyncio.Event().wait()

    if is_first:
        nats_server.kill()
    staying = asyncio.create_task(stay())
    if not is_first:
        await eventually(lambda: seen)
        nats_server.kill()
    async with listening(never_greet, nats_server.port):
        await eventually(lambda: len(met) > 3)
        await eventually(lambda: len(left) >= len(met) - 1)
        staying.cancel()
        await asyncio.wait([staying])
        await eventually(lambda: len(left) == len(met))


async def test_existing_stream_is_kept_unchanged(bus):
    await ensure_event_stream(bus.js, SUBJECTS, StreamLimits(max_bytes=5 << 20))
    await ensure_event_stream(bus.js, SUBJECTS, StreamLimits(max_bytes=9 << 20))
    info = await bus.js.stream_info(SUBJECTS.event_stream)
    assert info.config.max_bytes == 5 << 20
    await ensure_bucket(bus.js, SUBJECTS, 1)
    await ensure_bucket(bus.js, SUBJECTS, 1)


async def test_the_stream_loses_nothing_by_itself(bus):
    await ensure_event_stream(bus.js, SUBJECTS, StreamLimits())
    config = (await bus.js.stream_info(SUBJECTS.event_stream)).config
    assert (config.discard, config.max_age, config.allow_rollup_hdrs) == ("new", 0, True)


async def test_a_bus_that_is_away_is_one_error(bus, nats_server, eventually):
    nats_server.kill()
    await eventually(lambda: not bus.client.is_connected)
    with pytest.raises(BusUnavailableError):
        await ensure_event_stream(bus.js, SUBJECTS, StreamLimits())


@pytest.mark.parametrize("iterations", range(12))
async def test_closed_connection_does_not_reconnect(
    nats_server, eventually, monkeypatch, iterations
):
    """Also if it is closed in the very iteration of the loop that refuses its first attempt."""
    monkeypatch.setattr(module, "RECONNECT_S", 0)
    lost = asyncio.Event()

    def note(is_connected):
        if not is_connected:
            lost.set()

    async with connection(nats_server.url, "test", note):
        nats_server.kill()
        await lost.wait()
        for _ in range(iterations):
            await asyncio.sleep(0)
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_closed_connection_raises_bus_unavailable(bus):
    waiting = asyncio.create_task(until_closed(bus))
    await asyncio.sleep(0)
    await bus.client.close()
    with pytest.raises(BusUnavailableError):
        await waiting


async def test_a_cancellation_that_comes_with_an_answer_counts(bus, eventually):
    """A task that requests all the time can still be stopped."""
    asked = []

    async def ask():
        while True:
            async with translated("subject"):
                await answer_at_once()

    async def answer_at_once():
        asked.append(asyncio.get_running_loop().create_future())
        await asyncio.wait_for(asked[-1], 5)

    asking = asyncio.create_task(ask())
    await eventually(lambda: asked)
    asked[-1].set_result(None)
    asking.cancel()
    await asyncio.wait([asking], timeout=60)
    assert asking.cancelled()


async def test_messages_sent_without_a_connection_arrive_once_there_is_one(
    bus, nats_server, eventually
):
    received = []

    async def note(message):
        received.append((message.subject, message.headers, message.data))

    await bus.client.subscribe("_INBOX.>", cb=note)
    nats_server.kill()
    await eventually(lambda: not bus.client.is_connected)
    bus.client.send(b"_INBOX.a", b"NATS/1.0\r\nx: 1\r\n\r\n", b"first")
    bus.client.send(b"_INBOX.b", b"", b"second")
    nats_server.start()
    await eventually(lambda: len(received) == 2)
    assert received == [("_INBOX.a", {"x": "1"}, b"first"), ("_INBOX.b", None, b"second")]


async def test_no_more_than_the_limit_is_kept_without_a_connection(bus, nats_server, eventually):
    nats_server.kill()
    await eventually(lambda: not bus.client.is_connected)
    for _ in range(3):
        bus.client.send(b"_INBOX.a", b"", bytes(1_000_000))
        await asyncio.sleep(0)
    with pytest.raises(OutboundBufferLimitError):
        bus.client.send(b"_INBOX.a", b"", b"")


async def test_message_that_cannot_be_sent_raises(bus):
    with pytest.raises(MaxPayloadError):
        bus.client.send(b"_INBOX.a", b"", bytes(bus.client.max_payload + 1))
    for subject in (b"", b"_INBOX.a 0\r\n", b"_INBOX. a", b" _INBOX"):
        with pytest.raises(BadSubjectError):
            bus.client.send(subject, b"", b"")
    await bus.client.close()
    with pytest.raises(ConnectionClosedError):
        bus.client.send(b"_INBOX.a", b"", b"")
