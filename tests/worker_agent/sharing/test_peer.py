"""Blocks between workers over TCP: whole, proven, and only what leases allow."""

import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from hashlib import sha256

import pytest

from router.protocol.values import Rank
from router.runtime.security.http_access import ClientTls
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
    sealed,
)
from support.processes.certificates import Authority
from support.processes.servers import until
from worker_agent.blocks.descriptors import BlockDescriptorList
from worker_agent.sharing import peer_server
from worker_agent.sharing.blockset import (
    RemoteBlocksets,
    check_put,
    described_blocks,
    encode,
)
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.peer_messages import (
    Challenge,
    GetNamed,
    Mapped,
    Proof,
    Welcome,
)
from worker_agent.sharing.peer_server import MAX_STRANGERS
from worker_agent.sharing.peer_wire import (
    SERVER,
    Line,
    proof_of,
)
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.plan import BlockResult

DONE, FAILED, MISSING = BlockResult.DONE, BlockResult.FAILED, BlockResult.MISSING


@pytest.fixture
def owner():
    with Worker(1337) as worker:
        yield worker


@pytest.fixture
def other():
    with Worker(1338) as worker:
        yield worker


@pytest.fixture
def client(owner):
    client = owner.client()
    yield client
    client.close()


def granted(owner, index=HOST, count=4, until_s=FOREVER_S):
    return owner.leases.grant(owner.tiers[index].allocate(count), index, "lease", until_s)


def remote(owner, other, listed):
    """What the other worker makes of an export and a list."""
    blocksets = RemoteBlocksets(Rank(other.worker_id, 0), 77, peering.config_of(1))
    blocksets.import_remote_blockset(owner.export(), 0.0)
    return blocksets.get_remote_blocks_mutable(encode(listed), 0.0)


@pytest.mark.parametrize("ours", [DEVICE, HOST])
@pytest.mark.parametrize("theirs", [DEVICE, HOST])
def test_blocks_are_put_and_got_byte_for_byte(owner, other, client, ours, theirs):
    """Whatever the layout on either side."""
    sources = other.tiers[ours].allocate(4)
    other.write(ours, sources.block_ids, range(4))
    targets = remote(owner, other, granted(owner, theirs)).listed
    check_put(described_blocks(sources, Rank(other.worker_id, 0), ours), targets)
    blocks = other.windows[ours].outgoing(sources.block_ids)
    assert client.put(blocks, targets) == [DONE] * 4
    assert owner.read(theirs, targets.block_indices) == [content(n) for n in range(4)]
    owner.write(theirs, targets.block_indices, range(10, 14))
    room = other.windows[ours].incoming(sources.block_ids)
    assert client.get(targets, room) == [DONE] * 4
    assert other.read(ours, sources.block_ids) == [content(n) for n in range(10, 14)]
    counters = owner.server.counters
    assert (counters.received_blocks, counters.corrupt_blocks, counters.refused) == (4, 0, 0)


def test_blocks_are_not_put_onto_themselves(owner, other):
    listed = remote(owner, other, granted(owner)).listed
    with pytest.raises(TransferError, match="is a source, too"):
        check_put(listed, listed)


def test_held_blocks_are_got_by_name(owner, other, client):
    owner.keep(HOST, [1, 2]).release()
    owner.keep(DEVICE, [5]).release()
    blocks = other.tiers[HOST].allocate(3).block_ids
    room = other.windows[HOST].incoming(blocks)
    assert client.get_named(identities(1, 9, 2), room) == [DONE, MISSING, DONE]
    assert other.read(HOST, [blocks[0], blocks[2]]) == [content(1), content(2)]
    assert client.get_named(identities(5), other.windows[HOST].incoming(blocks[:1])) == [DONE]
    assert client.get_named(identities(8), room) == [MISSING]
    assert owner.tiers[HOST].pool.used_blocks == owner.tiers[DEVICE].pool.used_blocks == 0


def test_the_owner_enforces_its_leases_and_the_connection_goes_on(owner, other, client):
    handle = owner.keep(HOST, [1])
    listed = owner.leases.grant(handle, HOST, "read only", FOREVER_S)
    blocks = other.windows[HOST].outgoing([0])
    with pytest.raises(BlocksetError, match="immutable") as refused:
        client.put(blocks, BlockDescriptorList(1337, HOST, "mutable", *_rest(listed)))
    assert refused.value.rule == "immutable"
    with pytest.raises(BlocksetError) as refused:
        client.put(blocks, granted(owner, count=1, until_s=time.monotonic() - 1.0))
    assert refused.value.rule == "lease_expired"
    assert client.get(listed, other.windows[HOST].incoming([0])) == [DONE]
    assert owner.server.counters.refused == 2


def _rest(listed):
    return listed.block_indices, listed.lease, listed.epoch


def test_blocks_of_another_size_are_refused(owner):
    with Worker(1338, inner_dim=32) as other, pytest.raises(BlocksetError) as refused:
        owner.client().put(other.windows[HOST].outgoing([0]), granted(owner, count=1))
    assert refused.value.rule == "other_layout"


@pytest.mark.parametrize("token", [b"", b"another"])
def test_wrong_token_gets_no_blocks(owner, other, token):
    with pytest.raises(BlocksetError) as refused:
        owner.client(token).get(granted(owner), other.windows[HOST].incoming(range(4)))
    assert refused.value.rule == "token"
    assert owner.server.counters.sent_blocks == 0


def test_server_without_the_token_is_not_trusted(other):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        served = threads.submit(accept_any, listener)
        address = "tcp://{}:{}".format(*listener.getsockname())
        client = peering.PeerClient(address, 1337, peering.TOKEN)
        room = other.windows[HOST].incoming([0])
        assert client.get_named(identities(1), room) == [FAILED]
        served.result(60)


def accept_any(listener):
    line = Line(listener.accept()[0], "test", time.monotonic() + 60)
    line.send(Challenge(1337, bytes(32)))
    line.receive(Proof)
    line.send(Welcome(bytes(32)))
    line.close()


@pytest.mark.parametrize(
    "said", [b"\xff\xff\xff\x7f", b"\x03\x00\x00\x00abc", b"GET / HTTP/1.1\r\n\r\n", b""]
)
def test_invalid_message_closes_the_connection(owner, said):
    host, port = owner.server.addresses[0].removeprefix("tcp://").split(":")
    connection = socket.create_connection((host, int(port)), 60)
    with connection, suppress(OSError):  # it may have hung up already
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert owner.server.counters.sent_blocks == 0


@pytest.mark.parametrize(
    "said",
    [b"\x81\xa4type\xa1\xff", b"\x82\xa4type\xa5Proof\xa1x" + b"\x91" * 5000 + b"\xc0"],
    ids=["no text", "nested"],
)
def test_unreadable_proof_ends_one_connection(owner, said):
    with connected_to(owner) as connection:
        connection.sendall(len(said).to_bytes(4, "little") + said)
        until(lambda: owner.server.counters.broken == 1)
    until(lambda: owner.server.stranger_count == 0)


def test_memory_of_another_host_is_not_mapped(other, tmp_path):
    authority = Authority(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*authority.issue("worker"))
    trusting = ClientTls(str(authority.path))
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        listener.settimeout(60)
        served = threads.submit(offer_memory, listener, tls)
        address = "tcp://{}:{}".format(*listener.getsockname())
        client = peering.PeerClient(address, 1337, peering.TOKEN, tls=trusting)
        assert client.get_named(identities(1), other.windows[HOST].incoming([0])) == [FAILED]
        served.result(60)


def offer_memory(listener, tls):
    """A peer that answers over TLS as it may on one host only."""
    connected = tls.wrap_socket(listener.accept()[0], server_side=True)
    line, nonce = Line(connected, "test", time.monotonic() + 60), bytes(32)
    line.send(Challenge(1337, nonce))
    proof = line.receive(Proof)
    line.send(Welcome(proof_of(SERVER, peering.TOKEN, proof.nonce)))
    line.authenticate(peering.TOKEN, proof.nonce + nonce, is_client=False)
    line.receive(GetNamed)
    line.send(Mapped([], 768, 0, 4096, [0], {}, True))
    line.close()


def test_more_connections_than_may_be_are_refused():
    with Worker(1337, max_connections=1) as owner:
        first, second = owner.client(), owner.client()
        listed = granted(owner, count=1)
        target = owner.windows[DEVICE].incoming([0])
        assert first.get(listed, target) == [DONE]
        with pytest.raises(BlocksetError) as refused:
            second.get(listed, target)
        assert refused.value.rule == "connections"
        first.close()


def test_peers_are_served_while_strangers_hold_sockets():
    with Worker(1337) as owner, ExitStack() as stack:
        strangers = [stack.enter_context(connected_to(owner)) for _ in range(3 * MAX_STRANGERS)]
        client = owner.client()
        assert client.get(granted(owner, count=1), owner.windows[DEVICE].incoming([0])) == [DONE]
        until(lambda: owner.server.counters.refused >= 2 * MAX_STRANGERS)
        assert owner.server.stranger_count <= MAX_STRANGERS
        assert strangers
        client.close()


def test_stranger_has_few_seconds(monkeypatch):
    monkeypatch.setattr(peer_server, "PROOF_S", 0.2)
    with Worker(1337) as owner, connected_to(owner) as stranger:
        stranger.settimeout(60)
        while stranger.recv(4096):  # the challenge, then the end
            pass
        until(lambda: owner.server.stranger_count == 0)
        client = owner.client()
        room = owner.windows[DEVICE].incoming([0])
        assert client.get(granted(owner, count=1), room) == [DONE]
        with connected_to(owner) as another:  # while it has its seconds, the proven peer is idle
            another.settimeout(60)
            while another.recv(4096):
                pass
        assert client.get(granted(owner, count=1), room) == [DONE]
        client.close()


def connected_to(owner):
    host, port = owner.server.addresses[0].removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), 60)


def test_block_changed_on_the_way_is_never_handed_out(owner, other):
    """By one who also corrects the checksum."""
    with owner.keep(HOST, [1, 2]):
        ours, forged = content(1), b"x" * len(content(1))
        assert got_through(owner, other, sealed(ours), sealed(forged)) == [FAILED]


def test_request_changed_on_the_way_gets_no_block(owner, other):
    with owner.keep(HOST, [1, 2]):
        [ours], [forged] = identities(1), identities(2)
        assert got_through(owner, other, ours, forged) == [FAILED]


def got_through(owner, other, old, new):
    """What becomes of block 1 if bytes are changed on the way."""
    room = other.windows[HOST].incoming([0])
    with changing(owner.server.addresses[0], old, new) as address:
        client = peering.PeerClient(address, owner.worker_id, peering.TOKEN, timeout_s=60)
        outcomes = client.get_named(identities(1), room)
        client.close()
    return outcomes


def test_unexpected_worker_is_not_queried(owner, other):
    client = peering.PeerClient(owner.server.addresses[0], 99, peering.TOKEN)
    assert client.get_named(identities(1), other.windows[HOST].incoming([0])) == [FAILED]


def test_blocks_of_an_unreachable_peer_fail(owner, other):
    client = owner.client(timeout_s=5)
    owner.server.close(60)
    assert client.get_named(identities(1), other.windows[HOST].incoming([0])) == [FAILED]
    assert client.put(other.windows[HOST].outgoing([0]), granted(owner, count=1)) == [FAILED]


def test_the_next_process_of_a_worker_is_asked_at_once(owner, other, client):
    owner.keep(HOST, [1]).release()
    assert client.find(identities(1, 2)) == [0]
    port = int(owner.server.addresses[0].rpartition(":")[2])
    owner.server.close(60)
    with Worker(1337, port=port) as again:
        again.keep(HOST, [2]).release()
        assert client.find(identities(1, 2)) == [1]
        room = other.windows[HOST].incoming([0])
        assert client.get_named(identities(2), room) == [DONE]


def test_silent_peer_fails_at_the_deadline(other):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = "tcp://{}:{}".format(*mute.getsockname())
        client = peering.PeerClient(address, 1337, peering.TOKEN, timeout_s=0.2)
        room = other.windows[HOST].incoming([0, 1])
        assert client.get_named(identities(1, 2), room) == [FAILED, FAILED]


def test_two_processes_and_one_killed_in_the_middle(other):
    """Large blocks, so that the middle lasts: what had come is right, the rest has failed."""
    with WorkerProcess(1 << 17) as peer, Worker(1338, inner_dim=1 << 17) as here:
        blocksets = RemoteBlocksets(Rank(1338, 0), 77, peering.config_of(1, 1 << 17))
        blocksets.import_remote_blockset(peer.export, 0.0)
        targets = blocksets.get_remote_blocks_mutable(peer.listed, 0.0)
        client = peering.PeerClient(targets.addresses[0], 1337, peering.TOKEN, timeout_s=30.0)
        size_bytes = here.windows[HOST].block_bytes
        here.write(HOST, range(4), [20, 21, 22, 23])
        assert client.put(here.windows[HOST].outgoing(range(4)), targets.listed) == [DONE] * 4
        digest = sha256(content(21, size_bytes)).hexdigest()
        assert peer.read(targets.listed.block_indices[1]) == [digest]
        room = here.windows[HOST].incoming(range(8, 12))
        room.views = _Killing(peer.process, room.views)
        outcomes = client.get(targets.listed, room)
        assert outcomes[0] is DONE
        assert outcomes[-1] is FAILED
        right = outcomes.count(DONE)
        expected = [content(n, size_bytes) for n in range(20, 20 + right)]
        assert here.read(HOST, range(8, 8 + right)) == expected
        client.close()


class _Killing(list):
    """Views; when the second is asked for, the peer dies."""

    def __init__(self, process, views):
        super().__init__(views)
        self.process = process

    def __getitem__(self, place):
        if place == 1:
            self.process.kill()
            self.process.wait(60)
        return super().__getitem__(place)
