"""Two managers share blocks: across processes, across lives, and encrypted."""

import os
import signal
import ssl
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.runtime.security.http_access import ClientTls
from support.blocks import sharing_process
from support.blocks.sharing_process import MODEL, Bytes, config_of, shared
from support.processes.certificates import Authority
from worker_agent.manager.config import OnHost, Shared
from worker_agent.manager.manager import KvBlockManager
from worker_agent.sharing.blockset import encode
from worker_agent.sharing.errors import BlocksetError
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.plan import BlockResult

DONE, FAILED = BlockResult.DONE, BlockResult.FAILED


class Process:
    """A worker that shares its blocks, with commands."""

    def __init__(self, worker_id):
        here = Path(sharing_process.__file__)
        environment = {"PYTHONPATH": ":".join([str(here.parents[3]), *sys.path])}
        arguments = [sys.executable, str(here), str(worker_id)]
        self.process = subprocess.Popen(arguments, stdin=-1, stdout=-1, text=True, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def heard(self):
        return self.process.stdout.readline().strip()

    def told(self, command, rest=""):
        self.process.stdin.write(f"{command} {rest}\n")
        self.process.stdin.flush()
        return self.heard()


def digest_of(seed, size_bytes=768):
    return sha256(bytes((seed + i) % 256 for i in range(size_bytes))).hexdigest()


def test_two_processes_exchange_exports_and_one_puts_its_blocks_into_the_other_s():
    with Process(1337) as owner, Process(1338) as peer:
        exports = owner.heard(), peer.heard()
        assert (owner.told("hear", exports[1]), peer.told("hear", exports[0])) == ("new", "new")
        listed = owner.told("lease")
        assert peer.told("put", listed) == "done done done done"
        assert owner.told("read").split() == [digest_of(1338 + place) for place in range(4)]
        assert peer.told("same", listed) == "overlapping"
        assert peer.told("local") == "True"


@pytest.fixture
def managers():
    with KvBlockManager(config_of(1337)) as owner, KvBlockManager(config_of(1338)) as other:
        yield owner, other


def test_blocks_of_a_former_life_are_refused(managers):
    owner, other = managers
    first, here = shared(owner, epoch=1), shared(other)
    here.import_remote_blockset(first.export_local_blockset())
    old = encode(first.lease(owner.host().allocate(1), 60.0))
    remote = here.get_remote_blocks_mutable(old)
    first.close(60)
    second = shared(owner, epoch=2)
    with other.host().allocate(1) as blocks:
        assert here.get(remote, blocks) == [FAILED]  # the worker is gone
        here.import_remote_blockset(second.export_local_blockset())
        with pytest.raises(BlocksetError, match="epoch: 1"):
            here.get_remote_blocks_mutable(old)
        new = encode(second.lease(owner.host().allocate(1), 60.0))
        assert here.get(here.get_remote_blocks_immutable(new), blocks) == [DONE]
    second.close(60)
    here.close(60)


def test_leases_end_and_blocks_come_back(managers):
    owner, other = managers
    now_s = [0.0]
    sharing, here = shared(owner, clock=lambda: now_s[0]), shared(other)
    here.import_remote_blockset(sharing.export_local_blockset())
    listed = sharing.lease(owner.host().allocate(2), 10.0)
    remote = here.get_remote_blocks_mutable(encode(listed))
    with other.host().allocate(2) as blocks:
        assert here.put(blocks, remote) == [DONE, DONE]
        now_s[0] = 10.0
        with pytest.raises(BlocksetError) as refused:
            here.put(blocks, remote)
        assert refused.value.rule == "lease_expired"
    assert sharing.tick() == 1
    assert owner.host().status.active_blocks == 0
    kept = sharing.lease(owner.host().allocate(1), 10.0)
    sharing.take_back(kept).release()
    assert sharing.counters.received_blocks == 2
    sharing.close(60)
    here.close(60)


def test_blocks_leased_to_a_killed_peer_come_back(managers):
    owner, _ = managers
    now_s = [0.0]
    sharing = shared(owner, clock=lambda: now_s[0])
    with Process(1338) as peer:
        peer.heard()
        assert peer.told("hear", sharing.export_local_blockset().decode()) == "new"
        listed = sharing.lease(owner.host().allocate(4), 10.0)
        assert peer.told("put", encode(listed).decode()) == "done done done done"
        os.kill(peer.process.pid, signal.SIGKILL)
        peer.process.wait()
    now_s[0] = 9.9
    assert (sharing.tick(), sharing.leased_blocks) == (0, 4)
    now_s[0] = 10.0
    assert (sharing.tick(), sharing.leased_blocks) == (1, 0)
    assert owner.host().status.active_blocks == 0
    assert sharing.lease_counters.expired == 1
    sharing.close(60)


def test_leases_beyond_the_limit_are_refused(managers):
    owner, _ = managers
    sharing = shared(owner, max_leased_blocks=3)
    kept, more = sharing.lease(owner.host().allocate(2), 60.0), owner.host().allocate(2)
    with pytest.raises(BlocksetError, match=r"4 blocks leased \(allowed: 3 of a set at a time\)"):
        sharing.lease(more, 60.0)
    sharing.take_back(kept).release()
    sharing.lease(more, 60.0)
    sharing.close(60)
    assert owner.host().status.active_blocks == 0


def test_blocks_come_back_as_soon_as_a_put_has_finished(managers):
    owner, other = managers
    sharing, here = shared(owner), shared(other)
    here.import_remote_blockset(sharing.export_local_blockset())
    with other.host().allocate(1) as blocks:
        for _ in range(50):
            listed = sharing.lease(owner.host().allocate(1), 60.0)
            assert here.put(blocks, here.get_remote_blocks_mutable(encode(listed))) == [DONE]
            sharing.take_back(listed).release()
    sharing.close(60)
    here.close(60)


@pytest.mark.parametrize("is_local", [False, True])
def test_blocks_come_back_as_soon_as_a_get_has_finished(managers, tmp_path, is_local):
    owner, other = managers
    path = tmp_path / "socket" if is_local else None
    sharing, here = shared(owner, path=path), shared(other)
    here.import_remote_blockset(sharing.export_local_blockset())
    with other.host().allocate(1) as blocks:
        for _ in range(50):
            listed = sharing.lease(owner.host().allocate(1), 60.0)
            assert here.get(here.get_remote_blocks_mutable(encode(listed)), blocks) == [DONE]
            sharing.take_back(listed).release()
    sharing.close(60)
    here.close(60)


def test_unknown_block_is_refused(managers):
    owner, other = managers
    sharing = shared(owner)
    with other.host().allocate(1) as foreign, owner.host().allocate(1) as own:
        with pytest.raises(BlocksetError, match="of another manager"):
            sharing.lease(foreign, 1.0)
        with pytest.raises(TransferError, match="is a source, too"):
            sharing.copy(own, own)
        with pytest.raises(BlocksetError, match="cannot import blockset from self"):
            sharing.import_remote_blockset(sharing.export_local_blockset())
    sharing.close(60)


def test_another_model_s_blocks_are_of_no_use(managers):
    owner, _ = managers
    model = replace(MODEL, name="another")
    with KvBlockManager(config_of(1339, model)) as other:
        sharing, here = shared(owner), shared(other, model=model)
        with pytest.raises(BlocksetError) as refused:
            here.import_remote_blockset(sharing.export_local_blockset())
        assert refused.value.rule == "other_model"
        sharing.close(60)
        here.close(60)


def contexts(directory):
    """A server's, and a client's that trusts it."""
    authority = Authority(directory)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*authority.issue("worker"))
    return server, ClientTls(str(authority.path))


@pytest.mark.parametrize(("is_trusted", "outcome"), [(True, DONE), (False, FAILED)])
def test_only_trusted_peers_connect_over_tls(managers, tmp_path, is_trusted, outcome):
    owner, other = managers
    server_tls, client_tls = contexts(tmp_path)
    sharing = shared(owner, server_tls=server_tls)
    client_tls = client_tls if is_trusted else ClientTls()
    here = shared(other, client_tls=client_tls)
    here.import_remote_blockset(sharing.export_local_blockset())
    listed = sharing.lease(owner.host().allocate(2), 60.0)
    with other.host().allocate(2) as blocks:
        Bytes(other, other.host()).fill(blocks.block_ids, 5)
        targets = here.get_remote_blocks_mutable(encode(listed))
        assert here.put(blocks, targets) == [outcome] * 2
        if is_trusted:
            written = Bytes(owner, owner.host()).digests(listed.block_indices)
            assert written == [digest_of(5), digest_of(6)]
    here.close(60)
    sharing.close(60)


@pytest.mark.parametrize("is_shared", [True, False])
def test_on_one_host_memory_is_read_where_it_lies(managers, tmp_path, is_shared):
    """Or its bytes go over a socket of that host, where it is no shared memory."""
    _, other = managers
    place = Shared(tmp_path / "memory") if is_shared else OnHost()
    with KvBlockManager(config_of(1339, host=place)) as owner:
        sharing, here = shared(owner, path=tmp_path / "socket"), shared(other)
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
        here.import_remote_blockset(sharing.export_local_blockset())
        listed = sharing.lease(owner.host().allocate(3), 60.0)
        sources = here.get_remote_blocks_mutable(encode(listed))
        for seed in (7, 70):
            Bytes(owner, owner.host()).fill(listed.block_indices, seed)
            with other.host().allocate(3) as blocks:
                assert here.get(sources, blocks) == [DONE] * 3
                expected = [digest_of(seed + place) for place in range(3)]
                assert Bytes(other, other.host()).digests(blocks.block_ids) == expected
                Bytes(other, other.host()).fill(blocks.block_ids, seed + 3)
                assert here.put(blocks, sources) == [DONE] * 3
        digests = Bytes(owner, owner.host()).digests(listed.block_indices)
        assert digests == [digest_of(73 + place) for place in range(3)]
        assert sharing.counters.mapped_blocks == 6 * is_shared
        here.close(60)
        sharing.close(60)
