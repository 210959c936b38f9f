"""A stream is read in order and to its end, whatever happens to the server."""

import asyncio

import pytest

from router.ingest import event_stream
from router.ingest.event_stream import CaughtUp, Message, NatsStream, Restarted, StreamReader
from router.protocol.subjects import Subjects
from router.protocol.values import StreamPosition
from router.runtime.bus.connection import StreamLimits, connection, ensure_event_stream

SUBJECTS = Subjects("test")
SUBJECT = "kv.test.events.1.0"


def source(bus):
    async def ensure():
        await ensure_event_stream(bus.js, SUBJECTS, StreamLimits())

    return NatsStream(bus, SUBJECTS.event_stream, ensure)


class Reading:
    """A reader, and what it has read."""

    def __init__(self, bus, **options):
        self.reader = StreamReader(source(bus), **options)
        self.items = []
        self.task = asyncio.create_task(self._run())

    async def _run(self):
        async for item in self.reader.read():
            self.items.append(item)

    @property
    def payloads(self):
        return [int(item.payload) for item in self.items if isinstance(item, Message)]

    def count(self, kind):
        return sum(isinstance(item, kind) for item in self.items)


@pytest.fixture
async def read(bus):
    readings = []

    def start(**options):
        readings.append(Reading(bus, **options))
        return readings[-1]

    yield start
    for reading in readings:
        reading.task.cancel()
        await asyncio.wait([reading.task])


async def publish(bus, *numbers, subject=SUBJECT):
    await ensure_event_stream(bus.js, SUBJECTS, StreamLimits())
    for number in numbers:
        await bus.js.publish(subject, str(number).encode())


async def test_an_empty_stream_is_caught_up_with_at_once(read, eventually):
    reading = read()
    await eventually(lambda: reading.items == [CaughtUp()])


async def test_reads_the_past_then_the_present(bus, read, eventually):
    await publish(bus, *range(5))
    reading = read()
    await eventually(lambda: CaughtUp() in reading.items)
    assert reading.payloads == [0, 1, 2, 3, 4]
    await publish(bus, 5)
    await eventually(lambda: reading.payloads == [0, 1, 2, 3, 4, 5])
    assert reading.count(CaughtUp) == 1


async def test_a_message_is_read_when_it_comes(bus, read, eventually):
    reading = read()
    await eventually(lambda: reading.items)
    await publish(bus, 0)
    await eventually(lambda: reading.payloads == [0])


async def test_more_than_one_pull_of_messages(bus, read, eventually):
    await ensure_event_stream(bus.js, SUBJECTS, StreamLimits())
    futures = [await bus.js.publish_async(SUBJECT, str(n).encode()) for n in range(1500)]
    await asyncio.gather(*futures)
    reading = read()
    await eventually(lambda: CaughtUp() in reading.items)
    assert reading.payloads == list(range(1500))


async def test_latest_only_skips_what_was_replaced(bus, read, eventually):
    await publish(bus, 1, 2)
    await publish(bus, 3, subject="kv.test.events.2.0")
    reading = read(latest_only=True)
    await eventually(lambda: CaughtUp() in reading.items)
    assert reading.payloads == [2, 3]
    await publish(bus, 4)
    await eventually(lambda: reading.payloads == [2, 3, 4])


async def test_goes_on_after_the_server_was_killed(bus, read, nats_server, eventually):
    await publish(bus, 0, 1)
    reading = read()
    await eventually(lambda: reading.payloads == [0, 1])
    nats_server.kill()
    await eventually(lambda: not bus.client.is_connected)
    nats_server.start()
    async with connection(nats_server.url, "other", lambda _: None) as other:
        await publish(other, 2, 3)
    await eventually(lambda: reading.payloads == [0, 1, 2, 3])
    assert reading.count(Restarted) == 0


async def test_lost_store_yields_restarted(bus, read, nats_server, eventually):
    await publish(bus, 0, 1, 2)
    reading = read()
    await eventually(lambda: reading.payloads == [0, 1, 2])
    nats_server.kill()
    nats_server.start(empty=True)
    async with connection(nats_server.url, "other", lambda _: None) as other:
        await publish(other, 7)
    await eventually(lambda: reading.payloads == [0, 1, 2, 7])
    assert reading.count(Restarted) == 1


async def test_recreated_stream_yields_restarted(bus, read, eventually):
    await publish(bus, 0, 1, 2)
    reading = read()
    await eventually(lambda: len(reading.payloads) == 3)
    await bus.js.delete_stream(SUBJECTS.event_stream)
    await publish(bus, 7)
    await eventually(lambda: reading.payloads == [0, 1, 2, 7])
    assert reading.count(Restarted) == 1


async def test_reader_survives_a_deleted_consumer(bus, read, eventually):
    await publish(bus, 0)
    reading = read()
    await eventually(lambda: reading.payloads == [0])
    for consumer in await bus.js.consumers_info(SUBJECTS.event_stream):
        await bus.js.delete_consumer(SUBJECTS.event_stream, consumer.name)
    await publish(bus, 1)
    await eventually(lambda: reading.payloads == [0, 1])
    assert reading.count(Restarted) == 0


async def test_a_message_lost_on_the_way_is_read_again(bus, read, eventually, monkeypatch):
    await publish(bus, *range(6))
    receive, seen = event_stream._next, []

    async def losing(subscription):
        message = await receive(subscription)
        seen.append(message)
        return await receive(subscription) if len(seen) == 3 else message

    monkeypatch.setattr(event_stream, "_next", losing)
    reading = read()
    await eventually(lambda: CaughtUp() in reading.items)
    assert reading.payloads == [0, 1, 2, 3, 4, 5]


async def test_reader_continues_from_a_position(bus, read, eventually):
    await publish(bus, 0, 1, 2)
    first = read()
    await eventually(lambda: first.payloads == [0, 1, 2])
    position = first.reader.position
    await publish(bus, 3)
    second = read(after=position)
    await eventually(lambda: CaughtUp() in second.items)
    assert second.payloads == [3]
    assert second.count(Restarted) == 0
    assert second.reader.position == StreamPosition(position.created, 4)


async def test_position_of_another_stream_is_ignored(bus, read, eventually):
    await publish(bus, 0, 1)
    other = read(after=StreamPosition("another time", 1))
    shorter = read(after=StreamPosition((await source(bus).state()).created, 9))
    for reading in (other, shorter):
        await eventually(lambda reading=reading: CaughtUp() in reading.items)
        assert reading.items[0] == Restarted()
        assert reading.payloads == [0, 1]


async def test_reader_without_messages_has_no_position(bus):
    assert StreamReader(source(bus)).position is None
