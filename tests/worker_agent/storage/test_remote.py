"""Blocks in a real Redis: stored once, bounded, with results one by one."""

import os
import signal

import pytest
from redis import Redis

from router.errors import ConfigError
from router.runtime.security.redis_access import RedisAccess
from support.processes.servers import free_port, freeze
from worker_agent.storage.errors import StorageError
from worker_agent.storage.remote import (
    Lease,
    RemoteSettings,
    RemoteStorage,
    Sealed,
    redis_client,
)

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


def sealed(number):
    return Sealed(bytes([number]) * 64, number.to_bytes(8, "little"))


def put(storage, *numbers, now_s=1000.0):
    blocks = [sealed(number) for number in numbers]
    return storage.put([identity(number) for number in numbers], blocks, now_s)


def store(storage, *numbers, now_s=1000.0):
    assert put(storage, *numbers, now_s=now_s) == [None] * len(numbers)


def get(storage, *numbers):
    return storage.get([identity(number) for number in numbers])


def has(storage, *numbers):
    return storage.has([identity(number) for number in numbers])


def test_put_blocks_are_got(storage):
    store(storage, 1, 2)
    assert get(storage, 2, 3, 1) == [sealed(2), None, sealed(1)]
    assert has(storage, 1, 2, 3) == [True, True, False]
    storage.remove([identity(1)])
    assert has(storage, 1, 2) == [False, True]


def test_one_of_two_writers_stores(client, storage):
    other = RemoteStorage(client, RemoteSettings("ns", "llama-fp16", "worker-2", 64, 4, 60))
    store(storage, 1)
    wanted = [identity(1), identity(2)]
    assert storage.lease(wanted) == [Lease.ALREADY_STORED, Lease.GRANTED]
    assert other.lease(wanted) == [Lease.ALREADY_STORED, Lease.LEASED]
    store(storage, 2)
    assert other.lease(wanted) == [Lease.ALREADY_STORED] * 2
    assert client.keys("*:lease") == []  # a block that is given up may be stored again at once


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


def test_oldest_blocks_are_evicted_first(client, storage):
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


async def test_touched_blocks_stay_until_their_ttl(client, storage, eventually):
    for number in range(1, 5):
        store(storage, number, now_s=1000.0 + number)
    storage.touch([identity(1), identity(9)], 1005.0)
    store(storage, 5, now_s=1006.0)
    assert has(storage, 1, 2, 3, 4, 5) == [True, False, True, True, True]
    short = RemoteStorage(client, RemoteSettings("ns", "llama-fp16", "one", 64, 4, ttl_s=0.05))
    short.touch([identity(3)], 1007.0)
    await eventually(lambda: has(storage, 3) == [False])
    assert has(storage, 9) == [False]


@pytest.mark.parametrize("lost", [b"", b":seal"])
def test_a_block_without_its_seal_is_not_there_and_may_be_stored_again(client, storage, lost):
    store(storage, 1)
    client.delete(b"ns:llama-fp16:" + identity(1).hex().encode() + lost)
    assert (get(storage, 1), has(storage, 1)) == ([None], [False])
    assert storage.lease([identity(1)]) == [Lease.GRANTED]
    store(storage, 1)
    assert get(storage, 1) == [sealed(1)]


def test_reset_removes_all_blocks_of_a_model(client, storage):
    other = RemoteStorage(client, RemoteSettings("ns", "llama-fp8", "worker-1", 64, 4, 60))
    store(storage, 1, 2)
    store(other, 1)
    storage.clear()
    storage.clear()
    assert (has(storage, 1, 2), has(other, 1)) == ([False, False], [True])


def test_value_of_another_type_is_an_error(client, storage):
    store(storage, 1, 2)
    client.delete(b"ns:llama-fp16:" + identity(1).hex().encode())
    client.hset(b"ns:llama-fp16:" + identity(1).hex().encode(), "d", b"another kind")
    odd, right = get(storage, 1, 2)
    assert "WRONGTYPE" in str(odd)
    assert right == sealed(2)


def test_full_redis_fails_each_block(client, storage):
    client.config_set("maxmemory", "1")
    [error] = put(storage, 1)
    assert "maxmemory" in str(error)
    [error] = storage.lease([identity(1)])
    assert "maxmemory" in str(error)
    client.config_set("maxmemory", "0")
    store(storage, 1)


def test_a_redis_that_does_not_answer_is_an_error(redis_port, client):
    """It is stopped, and its socket stays open: only the deadline ends the call."""
    storage = RemoteStorage(redis_client(f"redis://127.0.0.1:{redis_port}", 0.1), SETTINGS)
    store(storage, 1)
    pid = client.info("server")["process_id"]
    freeze(pid)
    try:
        with pytest.raises(StorageError, match="redis: Timeout"):
            get(storage, 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert get(storage, 1) == [sealed(1)]


def test_password_file_is_read_at_every_connection(redis_port, client, tmp_path):
    file = tmp_path / "password"
    client.acl_setuser("agent", enabled=True, passwords=["+old"], keys=["*"], categories=["+@all"])
    access = RedisAccess("agent", str(file))
    file.write_text("old\n")
    agent = redis_client(f"redis://127.0.0.1:{redis_port}", 5.0, access)
    storage = RemoteStorage(agent, SETTINGS)
    store(storage, 1)
    client.acl_setuser("agent", enabled=True, passwords=["+new", "-old"])
    agent.connection_pool.disconnect()
    with pytest.raises(StorageError, match="redis: ") as refusal:
        get(storage, 1)
    assert "old" not in str(refusal.value)
    file.write_text("new")
    assert get(storage, 1) == [sealed(1)]
    file.unlink()
    assert get(storage, 1) == [sealed(1)]  # over the connection that is there
    agent.close()


def test_password_file_that_cannot_be_read_names_its_setting(tmp_path):
    with pytest.raises(ConfigError) as refusal:
        redis_client("redis://h", 1.0, RedisAccess(password_file=str(tmp_path / "missing")))
    assert refusal.value.key == "remote_cache_password_file"


def test_a_redis_that_is_gone_is_an_error():
    storage = RemoteStorage(redis_client(f"redis://127.0.0.1:{free_port()}", 1.0), SETTINGS)
    for call in (
        lambda: has(storage, 1),
        lambda: storage.lease([identity(1)]),
        lambda: put(storage, 1),
        lambda: get(storage, 1),
        lambda: storage.remove([identity(1)]),
    ):
        with pytest.raises(StorageError, match="redis: "):
            call()
