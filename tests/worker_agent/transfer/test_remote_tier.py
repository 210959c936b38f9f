"""The shared tier over a real Redis: right, or not there; no caller waits for a lost one."""

import os
import select
import signal
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
import torch
from redis import Redis

from support.processes.servers import free_port, freeze
from worker_agent.blocks.changes import BlockRemoved, BlockStored, CacheCleared
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool_values import PoolStatus, ResetOutcome
from worker_agent.storage.remote import RemoteSettings, RemoteStorage, redis_client
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.plan import BlockResult
from worker_agent.transfer.remote_tier import LEFT_ALONE_S, MAX_BATCH_BLOCKS, RemoteTier

pytestmark = pytest.mark.integration

DONE, KNOWN, MISSING, BUSY = (
    BlockResult.DONE,
    BlockResult.KNOWN,
    BlockResult.MISSING,
    BlockResult.BUSY,
)
FAILED, CORRUPT = BlockResult.FAILED, BlockResult.CORRUPT
BLOCK_BYTES = 1000
TTL_S = 600.0
SECRET = b"a secret of the fleet"


class Clock:
    """Time that passes when a test sets it."""

    def __init__(self):
        self.now_s = 1e9

    def __call__(self):
        return self.now_s


def tier_of(
    port, owner="worker-1", *, secret=SECRET, clock=None, io=None, timeout_s=30.0, max_blocks=100
):
    settings = RemoteSettings("ns", "llama", owner, BLOCK_BYTES, max_blocks, TTL_S)
    storage = RemoteStorage(redis_client(f"redis://127.0.0.1:{port}", timeout_s), settings)
    return RemoteTier(storage, settings, secret=secret, io=io, clock=clock or Clock())


@pytest.fixture(params=[True, False])
def tier(request, redis_port):
    of = tier_of(redis_port, io=IoThreads("redis", timeout_s=60) if request.param else None)
    yield of
    of.close()


@pytest.fixture
def client(redis_port):
    with Redis(port=redis_port) as client:
        yield client


def name(number):
    return BlockName(number.to_bytes(16, "little"), number)


def row(number):
    return (torch.arange(BLOCK_BYTES) * (number + 1) % 251).to(torch.uint8)


def store(tier, *numbers):
    return tier.store([name(number) for number in numbers], torch.stack(list(map(row, numbers))))


def load(tier, *numbers):
    """What became of each; all that came are right."""
    room = torch.zeros((len(numbers), BLOCK_BYTES), dtype=torch.uint8)
    outcomes = tier.load([name(number).identity for number in numbers], room)
    for got, number, outcome in zip(room, numbers, outcomes, strict=True):
        assert outcome is not DONE or torch.equal(got, row(number))
    return outcomes


def key(number):
    return b"ns:llama:" + name(number).identity.hex().encode()


def test_stored_blocks_are_loaded_by_any_tier(tier, redis_port):
    many = range(MAX_BATCH_BLOCKS + 3)
    assert store(tier, *many) == [DONE] * len(many)
    assert load(tier_of(redis_port, "other"), *many, 99) == [*[DONE] * len(many), MISSING]
    assert (tier.counters.stored, tier.counters.failed) == (len(many), 0)


def test_foreign_blocks_are_found_and_published(tier, redis_port, client):
    store(tier_of(redis_port, "other"), 1, 2)
    assert tier.find([name(1), name(2), name(3)]) == 2
    assert tier.take_changes() == [BlockStored(name(1)), BlockStored(name(2))]
    client.delete(key(2))
    assert tier.find([name(1), name(2)]) == 1
    assert tier.take_changes() == [BlockRemoved(name(2))]


def test_a_block_is_written_once(tier, redis_port, client):
    other = tier_of(redis_port, "other")
    store(tier, 1)
    client.set(key(2) + b":lease", "a third")
    assert store(other, 1, 2, 3) == [KNOWN, BUSY, DONE]
    assert other.take_changes() == [BlockStored(name(1)), BlockStored(name(3))]


def test_a_wrong_byte_is_never_handed_out(tier, client):
    store(tier, 1, 2, 3)
    tier.take_changes()
    client.setrange(key(1), 500, b"x")
    client.append(key(3), b"x")
    assert load(tier, 1, 2, 3) == [CORRUPT, DONE, CORRUPT]
    assert tier.take_changes() == [BlockRemoved(name(1)), BlockRemoved(name(3))]
    assert load(tier, 1) == [MISSING]
    assert tier.counters.corrupt == 2
    assert store(tier, 1) == [DONE]


@pytest.mark.parametrize("secret", [b"", b"another secret"])
def test_block_sealed_without_the_secret_is_never_handed_out(tier, redis_port, secret):
    """The writer of Redis has this very code."""
    assert store(tier_of(redis_port, "forger", secret=secret), 1) == [DONE]
    assert load(tier, 1) == [CORRUPT]
    assert load(tier, 1) == [MISSING]


def test_block_under_the_name_of_another_is_never_handed_out(tier, client):
    store(tier, 1, 2)
    for part in (b"", b":seal"):
        client.copy(key(2) + part, key(1) + part, replace=True)
    assert load(tier, 1, 2) == [CORRUPT, DONE]


def test_without_a_secret_seals_show_damage(redis_port, client):
    tier = tier_of(redis_port, secret=b"")
    store(tier, 1, 2)
    client.setrange(key(1), 500, b"x")
    assert load(tier, 1, 2) == [CORRUPT, DONE]


def test_a_byte_that_turns_on_the_wire_is_never_handed_out(redis_port):
    """Data, lengths and line ends of answers alike: a wrong checksum, or no answer at all."""
    outcomes = set()
    for place in (0, 1, 3, 40, 500, 1004, 1014, 1016, 1020, 1500):
        store(tier_of(redis_port), 1, 2)
        with turning_a_byte(redis_port, place) as port:
            tier = tier_of(port, timeout_s=0.5)
            outcomes.update(load(tier, 1, 2))
            tier.close()
    assert outcomes >= {DONE, CORRUPT, FAILED}


@contextmanager
def turning_a_byte(target_port, place):
    """A port that leads to a server; one byte of its answer, at an offset, is another."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=relay, args=(server, target_port, place))
        thread.start()
        yield server.getsockname()[1]
        thread.join(60)
        assert not thread.is_alive()


def relay(server, target_port, place):
    far = socket.create_connection(("127.0.0.1", target_port))
    with suppress(OSError), far, server.accept()[0] as near:
        pair = {near: far, far: near}
        while True:
            for source in select.select(pair, [], [])[0]:
                data = bytearray(source.recv(1 << 20))
                if not data:
                    return
                if source is far and len(data) > max(place, BLOCK_BYTES):
                    data[place] ^= 1
                pair[source].sendall(data)


def test_missing_block_is_published_as_removed(tier, client):
    store(tier, 1, 2)
    client.delete(key(1))  # what an evicting Redis does
    tier.take_changes()
    assert load(tier, 1, 2) == [MISSING, DONE]
    assert tier.take_changes() == [BlockRemoved(name(1))]
    outcome = tier.remove([name(2).identity, name(1).identity])
    assert outcome == ResetOutcome([name(2).identity], [name(1).identity], [])
    assert load(tier, 2) == [MISSING]
    assert tier.status == PoolStatus(0, 0, 100)
    tier.reset()
    assert tier.take_changes() == [CacheCleared()]


def test_expired_blocks_are_published_as_removed(redis_port):
    clock = Clock()
    tier = tier_of(redis_port, clock=clock)
    store(tier, 1, 2)
    tier.take_changes()
    clock.now_s += TTL_S / 2
    tier.touch([name(1).identity, name(9).identity])
    clock.now_s += TTL_S / 2
    assert tier.take_changes() == [BlockRemoved(name(2))]
    clock.now_s += TTL_S / 2
    assert tier.take_changes() == [BlockRemoved(name(1))]


def test_published_blocks_are_bounded(redis_port):
    tier = tier_of(redis_port, max_blocks=2)
    store(tier, 1, 2, 3)
    reported = tier.take_changes()
    assert reported[-1] == BlockRemoved(name(1))
    assert load(tier, 2, 3) == [DONE, DONE]


def test_measurement_leaves_no_blocks(redis_port, client):
    tier = tier_of(redis_port, max_blocks=2)
    store(tier, 1, 2)
    before = set(client.keys("*"))
    tier.take_changes()
    probe = tier.probe(torch.stack(list(map(row, range(MAX_BATCH_BLOCKS + 1)))))
    assert min(probe.read_bytes_per_s, probe.write_bytes_per_s) > 0
    assert (set(client.keys("*")), tier.take_changes()) == (before, [])
    assert load(tier, 1, 2) == [DONE, DONE]  # nothing is pushed out for it
    client.config_set("maxmemory", "1")
    assert tier.probe(row(0).unsqueeze(0)) is None


def test_full_redis_fails_each_block(tier, client):
    client.config_set("maxmemory", "1")
    assert store(tier, 1, 2) == [FAILED, FAILED]
    assert tier.take_changes() == []
    client.config_set("maxmemory", "0")
    assert store(tier, 1, 2) == [DONE, DONE]


def test_a_redis_that_evicts_is_a_shorter_prefix(tier, client):
    store(tier, *range(400))
    client.config_set("maxmemory-policy", "allkeys-random")
    client.config_set("maxmemory", client.info("memory")["used_memory"] - 40_000)
    outcomes = [each for first in range(400) for each in load(tier, first)]
    assert set(outcomes) == {DONE, MISSING}


@pytest.mark.parametrize("is_stopped", [True, False])
def test_unresponsive_redis_is_skipped_for_a_while(redis_port, client, is_stopped):
    clock, port = Clock(), redis_port if is_stopped else free_port()
    tier = tier_of(port, clock=clock, timeout_s=0.5)
    pid = client.info("server")["process_id"]
    if is_stopped:
        store(tier_of(port), 1)
        freeze(pid)
    try:
        assert load(tier, 1, 2) == [FAILED, FAILED]
        assert tier.is_down
        calls_s = clock.now_s  # nothing is asked now: no call waits for anything
        assert store(tier, 1) == load(tier, 1) == [FAILED]
        tier.touch([name(1).identity])
        assert tier.remove([name(1).identity]).not_reset == [name(1).identity]
        assert (tier.is_down, clock.now_s) == (True, calls_s)
    finally:
        os.kill(pid, signal.SIGCONT)
    outcomes = []
    while outcomes != [DONE if is_stopped else FAILED]:  # where we are late, so is its answer
        clock.now_s += LEFT_ALONE_S
        outcomes = load(tier, 1)
