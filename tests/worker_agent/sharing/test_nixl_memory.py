"""Blocks read from another worker's registered memory: whole, proven, and else over the socket."""

import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from xxhash import xxh3_64_intdigest

from support.fleets import peering
from support.fleets.peering import (
    DEVICE,
    FOREVER_S,
    HOST,
    Worker,
    WorkerProcess,
    changing,
    content,
    identities,
)
from support.processes.processes import processor_s
from support.processes.servers import until
from worker_agent.blocks.descriptors import BlockDescriptorList
from worker_agent.sharing.blockset import BlocksetExport, decode
from worker_agent.sharing.nixl_memory import (
    LANDING_BYTES,
    MODULES,
    NixlMemory,
    NixlUnavailableError,
)
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.sharing.peer_messages import Challenge, GetNamed, Proof, Readable, Sent, Welcome
from worker_agent.sharing.peer_wire import SERVER, Line, proof_of
from worker_agent.transfer.plan import BlockResult

DONE, FAILED, MISSING = BlockResult.DONE, BlockResult.FAILED, BlockResult.MISSING
LARGE = 1 << 16
"""With this inner dimension a block has 3 MiB, and few fit into the landing memory."""


@pytest.fixture(scope="module")
def owner():
    with Worker(1337, nixl=True) as worker:
        yield worker


@pytest.fixture(scope="module")
def memory():
    memory = NixlMemory([])
    yield memory
    memory.close()


@pytest.fixture
def other():
    with Worker(1338) as worker:
        yield worker


@pytest.fixture
def client(owner, memory):
    client = owner.client(nixl=memory)
    yield client
    client.close()


def read_by(memory, outcome):
    """The outcome of a call, and the number of blocks that it read through NIXL."""
    before = memory.counters.read_blocks
    return outcome(), memory.counters.read_blocks - before


def test_blocks_are_read_by_name_and_missing_ones_reported(owner, other, client, memory):
    room = other.windows[HOST].incoming([3, 1, 2])
    with owner.keep(HOST, [1, 2]):
        outcomes, read = read_by(memory, lambda: client.get_named(identities(2, 9, 1), room))
        assert (outcomes, read) == ([DONE, MISSING, DONE], 2)
        assert other.read(HOST, [3, 2]) == [content(2), content(1)]
        assert client.get_named(identities(9), room) == [MISSING]
    until(lambda: owner.server.counters.read_blocks >= 2)
    assert owner.tiers[HOST].pool.used_blocks == 0


def test_leased_blocks_are_read_and_then_unused(owner, other, client, memory):
    handle = owner.tiers[HOST].allocate(2)
    owner.write(HOST, handle.block_ids, [5, 6])
    listed = owner.leases.grant(handle, HOST, "read", FOREVER_S)
    room = other.windows[HOST].incoming([0, 1])
    assert read_by(memory, lambda: client.get(listed, room)) == ([DONE, DONE], 2)
    assert other.read(HOST, [0, 1]) == [content(5), content(6)]
    owner.leases.take_back("read").release()


def test_blocks_of_a_layout_in_pieces_come_over_the_socket(owner, other, client, memory):
    with owner.keep(DEVICE, [3]), owner.keep(HOST, [4]):
        room = other.windows[HOST].incoming([0, 1])
        outcomes = read_by(memory, lambda: client.get_named(identities(3, 4), room))
        assert outcomes == ([DONE, DONE], 0)
        assert other.read(HOST, [0, 1]) == [content(3), content(4)]


def test_reader_without_nixl_gets_blocks_over_the_socket(owner, other, memory):
    with owner.keep(HOST, [1]), closing(owner.client()) as client:
        room = other.windows[HOST].incoming([0])
        assert read_by(memory, lambda: client.get_named(identities(1), room)) == ([DONE], 0)


def test_owner_without_nixl_gives_blocks_over_the_socket(other, memory):
    with Worker(1337) as owner, owner.keep(HOST, [1]):
        with closing(owner.client(nixl=memory)) as client:
            room = other.windows[DEVICE].incoming([0])
            assert client.get_named(identities(1), room) == [DONE]
        assert other.read(DEVICE, [0]) == [content(1)]


def test_block_of_another_checksum_is_corrupt(other, memory):
    """A block that changed in the owner's memory after it was stored."""

    def proof(_block, identity):
        return xxh3_64_intdigest(content(2 if identity == identities(7)[0] else 1))

    with (
        Worker(1337, nixl=True, proof=proof) as owner,
        owner.keep(HOST, [1, 7]),
        closing(owner.client(nixl=memory)) as client,
    ):
        room = other.windows[HOST].incoming([0, 1])
        assert client.get_named(identities(1, 7), room) == [DONE, BlockResult.CORRUPT]


def test_proof_changed_on_the_way_hands_out_no_block(owner, other, memory):
    """By one who changes the block's bytes and its checksum, but does not have the key."""
    proof = xxh3_64_intdigest(content(1)).to_bytes(8, "little")
    with owner.keep(HOST, [1]), changing(owner.server.addresses[0], proof, b"forged!!") as address:
        client = PeerClient(address, 1337, peering.TOKEN, timeout_s=60, nixl=memory)
        with closing(client):
            assert client.get_named(identities(1), other.windows[HOST].incoming([0])) == [FAILED]


def test_two_connections_share_an_agent_and_end_alone(owner, other, memory):
    room = other.windows[HOST].incoming([0])
    with owner.keep(HOST, [1]), closing(owner.client(nixl=memory)) as first:
        before = memory.connections
        assert first.get_named(identities(1), room) == [DONE]
        with closing(owner.client(nixl=memory)) as second:
            assert second.get_named(identities(1), room) == [DONE]
            assert memory.connections == before + 1
        assert first.get_named(identities(1), room) == [DONE]
    assert memory.connections == before


def test_many_large_blocks_are_read_in_parts(memory):
    with (
        Worker(1337, inner_dim=LARGE, nixl=True) as owner,
        Worker(1338, inner_dim=LARGE) as other,
        closing(owner.client(nixl=memory)) as client,
    ):
        block_bytes = owner.windows[HOST].block_bytes
        numbers = range(2 * LANDING_BYTES // block_bytes + 1)
        with owner.keep(HOST, numbers):
            room = other.windows[HOST].incoming(numbers)
            names = identities(*numbers)
            assert read_by(memory, lambda: client.get_named(names, room)) == (
                [DONE] * len(numbers),
                len(numbers),
            )
        assert other.read(HOST, numbers) == [content(n, block_bytes) for n in numbers]


def test_another_process_is_read_while_it_runs(other, memory):
    """While it hangs, and once it is killed, the read fails; its memory is kept until then."""
    with WorkerProcess(16, "nixl") as owner:
        address = decode(owner.export, BlocksetExport).addresses[-1]
        client = PeerClient(address, 1337, peering.TOKEN, timeout_s=2, nixl=memory)
        room = other.windows[HOST].incoming(range(4))
        listed = decode(owner.listed, BlockDescriptorList)
        with closing(client):
            before = memory.counters.read_blocks
            until(lambda: client.get(listed, room) == [DONE] * 4)
            assert memory.counters.read_blocks >= before + 4
            assert other.read(HOST, range(4)) == [content(n) for n in range(4)]
            idle_s = processor_s(owner.process.pid)
            time.sleep(0.3)
            assert processor_s(owner.process.pid) - idle_s < 0.1, "an idle owner polls"
            owner.process.send_signal(signal.SIGSTOP)
            os.waitpid(owner.process.pid, os.WUNTRACED)
            assert client.get(listed, room) == [FAILED] * 4
            owner.process.send_signal(signal.SIGCONT)
            until(lambda: client.get(listed, room) == [DONE] * 4)
            owner.process.kill()
            owner.process.wait(60)
            assert client.get(listed, room) == [FAILED] * 4
    until(lambda: memory.can_read and not memory.abandoned)


def test_unreadable_memory_is_read_over_the_socket_and_left_alone(other, memory):
    """Whether what the owner says is no metadata, or leads nowhere."""
    with NixlOwner(Readable([], 768, [4096], b"of no agent")) as owner:
        client = PeerClient(owner.address, 1337, peering.TOKEN, timeout_s=60, nixl=memory)
        with closing(client):
            failed, room = memory.counters.failed_reads, other.windows[HOST].incoming([0])
            assert client.get_named(identities(1), room) == [DONE]
            assert other.read(HOST, [0]) == [content(1)]
            assert client.get_named(identities(1), room) == [DONE]
        assert owner.asked == [True, False, False]
        assert memory.counters.failed_reads == failed + 1


def test_address_outside_of_registered_memory_is_not_read(owner, other, memory):
    offered = Readable([], 768, [4096], owner.nixl.metadata)
    with NixlOwner(offered) as elsewhere:
        client = PeerClient(elsewhere.address, 1337, peering.TOKEN, timeout_s=60, nixl=memory)
        with closing(client):
            room = other.windows[HOST].incoming([0])
            assert client.get_named(identities(1), room) == [DONE]
        assert elsewhere.asked == [True, False]


@pytest.mark.parametrize("addresses", [[], [4096, 8192]])
def test_wrong_number_of_addresses_fails_the_request(owner, other, memory, addresses):
    with NixlOwner(Readable([], 768, addresses, owner.nixl.metadata)) as elsewhere:
        client = PeerClient(elsewhere.address, 1337, peering.TOKEN, timeout_s=60, nixl=memory)
        with closing(client):
            assert client.get_named(identities(1), other.windows[HOST].incoming([0])) == [FAILED]


def test_missing_package_is_named(monkeypatch):
    for name in ("nixl", *MODULES):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NixlUnavailableError, match="not installed"):
        NixlMemory([])


class NixlOwner:
    """A worker that offers memory in this way, and block 1 over the socket."""

    def __init__(self, offered):
        self.asked = []
        self._offered = offered
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(60)
        self.address = "tcp://{}:{}".format(*self._listener.getsockname())
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self):
        self._served = self._threads.submit(self._serve)
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown()
        self._listener.close()

    def _serve(self):
        while True:
            try:
                connected = self._listener.accept()[0]
            except OSError:
                return
            with connected:
                self._answer(Line(connected, "test", time.monotonic() + 60))

    def _answer(self, line):
        nonce = bytes(32)
        line.send(Challenge(1337, nonce))
        proof = line.receive(Proof)
        line.send(Welcome(proof_of(SERVER, peering.TOKEN, proof.nonce)))
        line.authenticate(peering.TOKEN, proof.nonce + nonce, is_client=False)
        while (request := line.receive_or_end(GetNamed)) is not None:
            self.asked.append(request.may_read)
            if request.may_read:
                line.send(self._offered)
                continue
            line.send(Sent([], 768))
            line.send_blocks([memoryview(content(1))])
