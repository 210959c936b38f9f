import asyncio
import socket
import struct
from contextlib import asynccontextmanager

import pytest

from router.api.rpc.responder import BusResponse, Responder, Waiting, head_of, headers_of
from router.observability.metrics import RouterMetrics
from router.runtime.bus.client import UNINTERRUPTED_MESSAGES
from router.runtime.bus.connection import connection
from support.processes.listening import listening
from support.processes.servers import free_port


@asynccontextmanager
async def running(bus, answer):
    """A responder on `subject`; a refusal is its text."""

    def refuse(head, error):
        return BusResponse(str(error).encode())

    responder = Responder("subject", "group", answer, refuse, RouterMetrics(), 9)
    listening = asyncio.Event()
    running = asyncio.create_task(responder.run(bus, listening.set))
    await listening.wait()
    yield responder
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])


async def test_failing_request_is_answered_and_ends_nothing(bus, caplog):
    async def fail():
        raise ValueError("a bug")

    def answer(head, body):
        if body == b"now":
            raise ZeroDivisionError
        later = {b"at work": fail, b"waiting": lambda: Waiting(b"", fail())}.get(body)
        return BusResponse(b"right") if later is None else later()

    async def ask(data):
        return (await bus.client.request("subject", data, timeout=60)).data

    async with running(bus, answer):
        for data in (b"now", b"at work", b"waiting"):
            assert await ask(data) == b"internal error"
        assert await ask(b"") == b"right"
    assert "ZeroDivisionError" in caplog.text
    assert "ValueError: a bug" in caplog.text


async def test_requests_in_progress_end_with_the_responder(bus):
    ended, begun = asyncio.Event(), asyncio.Event()

    async def wait_forever():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def answer(head, body):
        return wait_forever()

    async with running(bus, answer):
        await bus.client.publish("subject", b"", reply="_INBOX.a")
        await begun.wait()
    assert ended.is_set()


DATA_SEGMENTS_IN = 152
"""Where `struct tcp_info` of Linux has `tcpi_data_segs_in`: segments received with data."""


class OneWriteServer:
    """Speaks as nats-server does, and delivers any number of messages in one write."""

    def __init__(self):
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._inboxes = asyncio.Queue()
        self._writer = None

    @asynccontextmanager
    async def running(self):
        async with listening(self._serve, self.port):
            yield self

    async def deliver(self, count):
        """Deliver messages; return the inboxes of the responses."""
        sent = [b"MSG subject 1 _INBOX.%d 1\r\nx\r\n" % number for number in range(count)]
        self._writer.write(b"".join(sent))
        return [await self._inboxes.get() for _ in range(count)]

    def segments(self):
        """The number of writes received, as there is no delay that would join them."""
        connected = self._writer.get_extra_info("socket")
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return struct.unpack_from("I", info, DATA_SEGMENTS_IN)[0]

    async def _serve(self, reader, writer):
        self._writer = writer
        writer.write(b'INFO {"max_payload": 1048576, "headers": true}\r\n')
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            elif line.startswith(b"PUB"):
                self._inboxes.put_nowait(line.split()[1])


def right(head, body):
    return BusResponse(b"right")


async def test_responses_of_one_turn_are_one_write():
    async with (
        OneWriteServer().running() as server,
        connection(server.url, "test", lambda _: None) as bus,
        running(bus, right),
    ):
        before = server.segments()
        inboxes = await server.deliver(UNINTERRUPTED_MESSAGES)
        assert server.segments() == before + 1
        assert inboxes == [b"_INBOX.%d" % number for number in range(UNINTERRUPTED_MESSAGES)]


async def test_other_tasks_run_between_many_messages():
    turns, seen = 0, []

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def answer(head, body):
        seen.append(turns)
        return BusResponse(b"right")

    async with (
        OneWriteServer().running() as server,
        connection(server.url, "test", lambda _: None) as bus,
        running(bus, answer),
    ):
        counting = asyncio.create_task(count())
        await server.deliver(10 * UNINTERRUPTED_MESSAGES)
        counting.cancel()
    assert max(map(seen.count, seen)) <= UNINTERRUPTED_MESSAGES


@pytest.mark.parametrize(
    ("head", "headers"),
    [
        (b"", {}),
        (b"NATS/1.0\r\n\r\n", {}),
        (b"NATS/1.0 503 none\r\n\r\n", {}),
        (b"NATS/1.0\r\na: 1\r\nA:2\r\na : 3 \r\n\r\n", {"a": "3", "A": "2"}),
        (b"NATS/1.0\r\nno colon\r\na: b: c\r\nd:\r\n\r\n", {"a": "b: c", "d": ""}),
        (b"NATS/1.0\r\na: \xc3\xa9\xff\r\n\r\n", {"a": "é\ufffd"}),
    ],
)
def test_headers_are_read_as_they_were_sent(head, headers):
    assert headers_of(head) == headers


def test_no_value_of_a_header_ends_its_line():
    head = head_of({"a": "1\r\nb: 2", "c": "é\ud800"}, head_of({"first": "x"}))
    assert headers_of(head) == {"first": "x", "a": "1  b: 2", "c": "é?"}
