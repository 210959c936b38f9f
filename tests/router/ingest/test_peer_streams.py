"""Records in a stream, however its bytes are cut, and queues that are full."""

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.http.api import PeerResponse
from router.errors import WireError
from router.ingest.errors import TooManyPeersError
from router.ingest.peer_streams import (
    MOST_WAITING_BYTES,
    Kind,
    NotServingError,
    PeerStreams,
    RecordReader,
    decode_greeting,
    encode_record,
)
from router.protocol.replicas import PeerGreeting
from router.runtime.bus.errors import BusUnavailableError
from router.sequence.replicas.replica_set import MAX_REPLICAS

OURS = PeerGreeting(1, 7, "one", "test", "public")


def other(router_id=2, incarnation=1):
    return PeerGreeting(router_id, incarnation, f"r{router_id}", "test", "public")


def streams(joined=lambda: None):
    return PeerStreams(OURS, joined)


def records(data):
    return list(RecordReader().feed(data))


@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=40)), max_size=8),
    st.integers(1, 20),
)
def test_records_are_read_whole_however_their_bytes_are_cut(sent, size):
    data = b"".join(encode_record(*record) for record in sent)
    reader, found = RecordReader(), []
    for at in range(0, len(data), size):
        found += reader.feed(data[at : at + size])
    assert found == sent


@pytest.mark.parametrize("head", [b"\xff\xff\xff\xff\x01", b"\x00\x00\x00\x01\x09"])
def test_a_record_of_another_kind_or_size_is_refused(head):
    with pytest.raises(WireError, match="a record of kind"):
        records(head + b"x")


async def test_a_stream_begins_with_a_greeting_and_ends_behind_what_waits():
    joined = []
    ours = streams(lambda: joined.append(True))
    stream = ours.join(other())
    assert joined
    (kind, payload), *rest = records(await stream.take())
    assert (kind, decode_greeting(payload), rest) == (Kind.GREETING, OURS, [])
    ours.publish(encode_record(Kind.FRAME, b"frame"))
    assert ours.to(2).offer(encode_record(Kind.TO_ONE, b"message"))
    ours.close()
    assert records(await stream.take()) == [(Kind.FRAME, b"frame"), (Kind.TO_ONE, b"message")]
    assert await stream.take() == b""
    with pytest.raises(NotServingError):
        ours.join(other())


async def test_what_a_full_queue_cannot_take_is_dropped_and_counted():
    ours = streams()
    stream = ours.join(other())
    assert await stream.take()
    large = encode_record(Kind.FRAME, bytes(MOST_WAITING_BYTES))
    ours.publish(large)  # one alone may exceed the limit
    ours.publish(encode_record(Kind.FRAME, b"frame"))
    assert ours.overflows == 1
    reading = asyncio.create_task(stream.until_read())
    await asyncio.sleep(0)
    assert not reading.done()
    assert await stream.take() == large
    await reading
    assert stream.offer(encode_record(Kind.FRAME, b"frame"))


async def test_the_newest_stream_of_a_router_takes_the_place_of_an_earlier_one():
    ours = streams()
    earlier, later = ours.join(other()), ours.join(other(incarnation=2))
    assert ours.to(2) is later
    assert await earlier.take()
    assert await earlier.take() == b""
    ours.leave(earlier)
    assert ours.to(2) is later
    ours.leave(later)
    with pytest.raises(BusUnavailableError, match="router 2 is not connected"):
        ours.to(2)


async def test_router_that_vanishes_before_the_first_byte_gives_its_place_back():
    ours = streams()
    stream = ours.join(other())

    async def records():
        yield await stream.take()

    async def disconnected():
        return {"type": "http.disconnect"}

    async def send(_):
        await asyncio.Event().wait()

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    leave = partial(ours.leave, stream)
    await PeerResponse(records(), leave)(scope, disconnected, send)
    assert len(ours) == 0


def test_streams_are_limited():
    ours = streams()
    for router_id in range(2, 2 + MAX_REPLICAS):
        ours.join(other(router_id))
    with pytest.raises(TooManyPeersError):
        ours.join(other(1000))
    assert len(ours) == MAX_REPLICAS
