"""Blocks in a real Redis: stored once, bounded, and told of one by one."""

import pytest
from redis import Redis

from router.block_errors import StorageError
from servers import free_port
from worker_agent.storage.remote import Lease, RemoteBlock, RemoteSettings, RemoteStorage

pytestmark = pytest.mark.integration

SETTINGS = RemoteSettings("ns", "llama-fp16", "worker-1", block_bytes=64, max_blocks=4, ttl_s=60)


@pytest.fixture
def client(redis_port):
    with Redis(port=redis_port, socket_timeout=5) as client:
        yield client


@pytest.fixture
def storage(client):
    return RemoteStorage(client, SETTINGS)


def identity(number):
    return number.to_bytes(16, "little")


def block(number, size_bytes=64):
    return RemoteBlock(identity(number), number * 7, memoryview(bytes([number]) * size_bytes))


def store(storage, *numbers, now_s=1000.0):
    assert storage.put([block(number) for number in numbers], now_s) == [None] * len(numbers)


def get(storage, *numbers):
    """Checksums, and the first byte of what is there."""
    buffers = [bytearray(64) for _ in numbers]
    found = storage.get([identity(number) for number in numbers], [memoryview(b) for b in buffers])
    return [(each, buffer[0]) for each, buffer in zip(found, buffers, strict=True)]


def has(storage, *numbers):
    return storage.has([identity(number) for number in numbers])


def test_what_is_put_is_got(storage):
    store(storage, 1, 2)
    assert get(storage, 2, 3, 1) == [(14, 2), (None, 0), (7, 1)]
    assert has(storage, 1, 2, 3) == [True, True, False]
    storage.remove([identity(1)])
    assert has(storage, 1, 2) == [False, True]


def test_one_of_two_writes(client, storage):
    other = RemoteStorage(client, RemoteSettings("ns", "llama-fp16", "worker-2", 64, 4, 60))
    store(storage, 1)
    wanted = [identity(1), identity(2)]
    assert storage.lease(wanted) == [Lease.ALREADY_STORED, Lease.GRANTED]
    assert other.lease(wanted) == [Lease.ALREADY_STORED, Lease.LEASED]
    store(storage, 2)
    assert other.lease(wanted) == [Lease.ALREADY_STORED] * 2


async def test_a_lease_ends_by_itself(client, eventually):
    short = RemoteStorage(client, RemoteSettings("ns", "f", "one", 64, 4, 60, lease_s=0.05))
    other = RemoteStorage(client, RemoteSettings("ns", "f", "two", 64, 4, 60))
    assert short.lease([identity(1)]) == [Lease.GRANTED]
    await eventually(lambda: other.lease([identity(1)]) == [Lease.GRANTED])


def test_another_model_s_blocks_are_not_found(client, storage):
    store(storage, 1)
    for other in (
        RemoteSettings("ns", "llama-fp8", "worker-1", 64, 4, 60),
        RemoteSettings("other", "llama-fp16", "worker-1", 64, 4, 60),
    ):
        assert has(RemoteStorage(client, other), 1) == [False]


def test_what_was_stored_first_goes_when_there_is_too_much(client, storage):
    for number in range(1, 8):
        store(storage, number, now_s=1000.0 + number)
    assert has(storage, *range(1, 8)) == [False] * 3 + [True] * 4
    assert client.zcard(b"ns:llama-fp16:stored") == 4


async def test_blocks_expire(client, eventually):
    short = RemoteStorage(client, RemoteSettings("ns", "f", "one", 64, 4, ttl_s=0.05))
    store(short, 1)
    await eventually(lambda: has(short, 1) == [False])
    store(short, 2, now_s=1000.1)
    assert client.zcard(b"ns:f:stored") == 1


def test_what_cannot_be_this_block_is_told(client, storage):
    store(storage, 1, 2)
    client.hset(b"ns:llama-fp16:" + identity(1).hex().encode(), "d", b"short")
    client.set(b"ns:llama-fp16:" + identity(3).hex().encode(), b"no hash")
    (wrong, _), (right, byte), (odd, _) = get(storage, 1, 2, 3)
    assert isinstance(wrong, StorageError)
    assert "block: 5 bytes (allowed: 64 bytes)" in str(wrong)
    assert (right, byte) == (14, 2)
    assert "WRONGTYPE" in str(odd)


def test_a_full_redis_is_told_block_by_block(client, storage):
    client.config_set("maxmemory", "1")
    [error] = storage.put([block(1)], 1000.0)
    assert "maxmemory" in str(error)
    client.config_set("maxmemory", "0")
    store(storage, 1)


def test_a_redis_that_is_gone_is_an_error():
    storage = RemoteStorage(Redis(port=free_port(), socket_timeout=1), SETTINGS)
    for call in (
        lambda: has(storage, 1),
        lambda: storage.lease([identity(1)]),
        lambda: storage.put([block(1)], 1.0),
        lambda: get(storage, 1),
        lambda: storage.remove([identity(1)]),
    ):
        with pytest.raises(StorageError, match="redis: "):
            call()
