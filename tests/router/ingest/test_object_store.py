"""An object is there whole or not at all, whichever process writes, reads or dies on the way."""

import asyncio
import json
import os
from base64 import urlsafe_b64encode

import pytest
from nats.js.errors import NotFoundError

from router.indexer.base import SnapshotError
from router.ingest import object_store
from router.ingest.object_store import CHUNK_BYTES, ObjectBucket
from router.runtime.bus.connection import connection
from router.runtime.bus.errors import BusUnavailableError, LogConflictError

LIMIT_BYTES = 8 << 20
STREAM = "OBJ_b"
ABOUT = f"$O.b.M.{urlsafe_b64encode(b'o').decode()}"
CHUNKS = "$O.b.C.>"


def random_bytes(count):
    return memoryview(os.urandom(count))


@pytest.fixture
def bucket(bus):
    return ObjectBucket(bus, "b", "o", limit_bytes=LIMIT_BYTES)


async def chunk_count(bus):
    info = await bus.js.stream_info(STREAM, subjects_filter=CHUNKS)
    return sum((info.state.subjects or {}).values())


async def describe(bus, **changes):
    message = await bus.js.get_last_msg(STREAM, ABOUT)
    about = {**json.loads(message.data), **changes}
    await bus.js.publish(ABOUT, json.dumps(about).encode(), headers={"Nats-Rollup": "sub"})


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 70 * CHUNK_BYTES - 1])
async def test_written_bytes_are_read_back(bus, size):
    bucket, payload = ObjectBucket(bus, "b", "o", limit_bytes=1 << 24), random_bytes(size)
    await bucket.write(payload)
    assert await bucket.read() == payload


async def test_a_bucket_that_was_never_written_has_no_object(bucket):
    assert await bucket.read() is None


async def test_clients_of_object_stores_read_it(bus, bucket):
    payload = random_bytes(3 * CHUNK_BYTES + 5)
    await bucket.write(payload)
    store = await bus.js.object_store("b")
    result = await store.get("o")
    assert result.data == payload
    assert (result.info.size, result.info.chunks) == (len(payload), 4)
    assert result.info.options.max_chunk_size == CHUNK_BYTES
    assert [info.name for info in await store.list()] == ["o"]


async def test_object_of_another_client_is_read(bus, bucket):
    payload = random_bytes(5 * CHUNK_BYTES)
    store = await bus.js.create_object_store("b")
    await store.put("o", bytes(payload))
    assert await bucket.read() == payload
    await bucket.write(payload[:7])
    assert (await store.get("o")).data == payload[:7]


async def test_only_the_present_object_is_kept(bus, bucket):
    for _ in range(3):
        payload = random_bytes(2 * CHUNK_BYTES)
        await bucket.write(payload)
    assert await chunk_count(bus) == 2
    assert await bucket.read() == payload


async def test_object_can_be_deleted(bus, bucket):
    await bucket.delete()
    await bucket.write(random_bytes(10))
    await bucket.delete()
    assert await bucket.read() is None
    assert await chunk_count(bus) == 0


async def test_deleted_object_is_none(bus, bucket):
    await bucket.write(random_bytes(10))
    store = await bus.js.object_store("b")
    await store.delete("o")
    assert await bucket.read() is None


async def test_chunks_of_a_killed_writer_are_purged(bus, bucket):
    await bucket.write(random_bytes(CHUNK_BYTES))
    for _ in range(3):
        await bus.js.publish("$O.b.C.orphan", b"x")
    kept = await bucket.read()
    assert len(kept) == CHUNK_BYTES
    await bucket.write(kept)
    assert await chunk_count(bus) == 1
    assert await bucket.read() == kept


async def test_a_writer_cancelled_in_the_middle_leaves_the_object_as_it_was(bus, bucket):
    before = random_bytes(CHUNK_BYTES)
    await bucket.write(before)
    writing = asyncio.create_task(bucket.write(random_bytes(50 * CHUNK_BYTES)))
    while await chunk_count(bus) < 5:
        await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])
    assert await bucket.read() == before
    await bucket.write(before)
    assert await chunk_count(bus) == 1


async def test_of_two_writers_at_once_one_gives_up(bus, bucket, nats_server):
    async with connection(nats_server.url, "other", lambda _: None) as other_bus:
        other = ObjectBucket(other_bus, "b", "o", limit_bytes=LIMIT_BYTES)
        payloads = [random_bytes(20 * CHUNK_BYTES) for _ in range(2)]
        for _ in range(5):
            outcomes = await asyncio.gather(
                bucket.write(payloads[0]), other.write(payloads[1]), return_exceptions=True
            )
            assert sorted(map(type, outcomes), key=str) == [type(None), LogConflictError] or (
                outcomes == [None, None]
            )
            assert await bucket.read() in payloads
            assert await chunk_count(bus) == 20


async def test_a_reader_beside_a_writer_gets_one_or_the_other(bus, bucket, nats_server):
    first, second = random_bytes(60 * CHUNK_BYTES), random_bytes(60 * CHUNK_BYTES)
    await bucket.write(first)
    async with connection(nats_server.url, "other", lambda _: None) as other_bus:
        other = ObjectBucket(other_bus, "b", "o", limit_bytes=LIMIT_BYTES)
        for payload in (second, first, second):
            writing = asyncio.create_task(other.write(payload))
            while not writing.done():
                assert await bucket.read() in (first, second)
            await writing


async def test_torn_objects_are_refused(bus, bucket):
    payload = random_bytes(3 * CHUNK_BYTES)

    async def problem(**changes):
        await bucket.write(payload)
        await describe(bus, **changes)
        with pytest.raises(SnapshotError) as raised:
            await bucket.read()
        return raised.value.problem

    assert await problem(nuid="gone") == "torn"
    assert await problem(chunks=2) == "torn"
    assert await problem(size=len(payload) - 1) == "torn"
    assert await problem(size=len(payload) + 1) == "torn"
    assert await problem(digest="SHA-256=AAAA") == "torn"
    assert await problem(size=LIMIT_BYTES + 1) == "too large"


async def test_missing_chunks_raise_a_snapshot_error(bus, bucket):
    await bucket.write(random_bytes(3 * CHUNK_BYTES))
    info = await bus.js.stream_info(STREAM)
    await bus.js.delete_msg(STREAM, info.state.first_seq + 1)
    with pytest.raises(SnapshotError):
        await bucket.read()


async def test_an_unreadable_description_is_no_object(bus, bucket):
    await bucket.write(random_bytes(10))
    await bus.js.publish(ABOUT, b"garbage")
    assert await bucket.read() is None
    await bucket.write(random_bytes(10))
    assert len(await bucket.read()) == 10


async def test_a_description_may_name_no_other_subject(bus, bucket):
    await bucket.write(random_bytes(10))
    await describe(bus, nuid="x.>")
    assert await bucket.read() is None


async def test_oversized_object_is_not_written(bus, bucket):
    with pytest.raises(SnapshotError):
        await bucket.write(random_bytes(LIMIT_BYTES + 1))
    with pytest.raises(NotFoundError):
        await bus.js.stream_info(STREAM)


async def test_lost_bus_raises_bus_unavailable(bucket, nats_server, monkeypatch):
    await bucket.write(random_bytes(10))
    nats_server.kill()
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT_S", 0.2)
    with pytest.raises(BusUnavailableError):
        await bucket.write(random_bytes(10))
