"""Both transports keep the same contract; NATS with a real server."""

import asyncio

import pytest

from router.protocol.subjects import Subjects
from router.runtime.bus import transport as module
from router.runtime.bus.connection import StreamLimits
from router.runtime.bus.errors import BusUnavailableError, LogConflictError, LogFullError
from router.runtime.bus.transport import NatsTransport
from support.fleets.memory_transport import MemoryTransport

SUBJECTS = Subjects("test")
SUBJECT, OTHER = "kv.test.events.1.0", "kv.test.events.2.0"


@pytest.fixture(params=["memory", "nats"])
def transport(request, bus):
    if request.param == "memory":
        return MemoryTransport()
    return NatsTransport(bus, SUBJECTS, StreamLimits())


async def test_appends_in_order(transport):
    assert await transport.last_sequence(SUBJECT) == 0
    first = await transport.append(SUBJECT, b"a", expected_sequence=0)
    second = await transport.append(SUBJECT, b"b", expected_sequence=first)
    assert second > first
    assert await transport.last_sequence(SUBJECT) == second


async def test_subjects_are_apart(transport):
    assert await transport.last_sequence(OTHER) == 0
    first = await transport.append(SUBJECT, b"a", expected_sequence=0)
    await transport.append(OTHER, b"b", expected_sequence=0)
    assert await transport.last_sequence(SUBJECT) == first


async def test_unexpected_sequence_is_refused(transport):
    assert await transport.last_sequence(SUBJECT) == 0
    first = await transport.append(SUBJECT, b"a", expected_sequence=0)
    with pytest.raises(LogConflictError) as caught:
        await transport.append(SUBJECT, b"b", expected_sequence=0)
    assert caught.value.subject == SUBJECT
    assert await transport.last_sequence(SUBJECT) == first


async def test_replaces_history(transport):
    await transport.last_sequence(SUBJECT)
    first = await transport.append(SUBJECT, b"a", expected_sequence=0)
    await transport.append(OTHER, b"x", expected_sequence=0)
    second = await transport.append(SUBJECT, b"b", expected_sequence=first, replaces_history=True)
    third = await transport.append(SUBJECT, b"c", expected_sequence=second)
    await transport.drop_before(SUBJECT, third)
    assert await transport.last_sequence(SUBJECT) == third
    assert await transport.last_sequence(OTHER) > 0


async def test_nats_keeps_only_what_replaced_history(bus):
    transport = NatsTransport(bus, SUBJECTS, StreamLimits())
    sequence = await transport.last_sequence(SUBJECT)
    for payload in (b"a", b"b", b"c"):
        sequence = await transport.append(SUBJECT, payload, expected_sequence=sequence)
    await transport.append(SUBJECT, b"d", expected_sequence=sequence, replaces_history=True)
    info = await bus.js.stream_info(SUBJECTS.event_stream)
    assert info.state.messages == 1


async def test_nats_refuses_when_the_stream_is_full(bus):
    transport = NatsTransport(bus, SUBJECTS, StreamLimits(max_bytes=1 << 20))
    sequence = await transport.last_sequence(SUBJECT)
    for _ in range(2):
        sequence = await transport.append(SUBJECT, bytes(500_000), expected_sequence=sequence)
    with pytest.raises(LogFullError):
        await transport.append(SUBJECT, bytes(500_000), expected_sequence=sequence)


async def test_unreachable_nats_raises_bus_unavailable(bus, nats_server, eventually):
    transport = NatsTransport(bus, SUBJECTS, StreamLimits())
    await transport.last_sequence(SUBJECT)
    nats_server.kill()
    await eventually(lambda: not bus.client.is_connected)
    with pytest.raises(BusUnavailableError):
        await transport.broadcast("kv.test.load.1.0", b"")


async def test_broadcasts_reach_subscribers(bus):
    transport = NatsTransport(bus, SUBJECTS, StreamLimits())
    subscription = await bus.client.subscribe("kv.test.load.*.*")
    await transport.broadcast("kv.test.load.1.0", b"busy")
    message = await subscription.next_msg(timeout=60)
    assert (message.subject, message.data) == ("kv.test.load.1.0", b"busy")


async def test_memory_broadcasts_can_be_read():
    transport = MemoryTransport()
    await transport.broadcast("kv.test.load.1.0", b"busy")
    assert transport.broadcasts == [("kv.test.load.1.0", b"busy")]


async def test_an_answer_that_never_comes_is_not_waited_for(
    bus, nats_server, monkeypatch, eventually
):
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 600.0)
    transport = NatsTransport(bus, SUBJECTS, StreamLimits())
    await transport.last_sequence(SUBJECT)
    nats_server.pause()
    sent = bus.client.stats["out_msgs"]
    appending = asyncio.create_task(transport.append(SUBJECT, b"x", expected_sequence=0))
    await eventually(lambda: bus.client.stats["out_msgs"] > sent)
    nats_server.kill()
    with pytest.raises(BusUnavailableError):
        await asyncio.wait_for(appending, 60.0)
