"""Blocks of another process: by a plain socket with a tag, and as workers get them.

python benchmarks/connector_peer.py BLOCKS      the other process; prints where it is, a line each
"""

import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread
from typing import Self

import torch
from cryptography.hazmat.primitives.ciphers.algorithms import AES

from router.protocol.values import Rank
from router.runtime.security.http_access import ClientTls
from router.runtime.security.tls import ServerTls
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.names import BlockName
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.shared_pool import SharedPool
from worker_agent.sharing.leases import Leases
from worker_agent.sharing.nixl_memory import NixlMemory
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.sharing.peer_server import PeerServer
from worker_agent.sharing.peer_wire import Tag
from worker_agent.sharing.shared_sets import SharedSet
from worker_agent.storage.mapped_file import MappedFile
from worker_agent.storage.memory import MemoryStorage, host_memory, shared_memory
from worker_agent.transfer.block_window import BlockWindow
from worker_agent.transfer.physical import PhysicalLayout, physical
from worker_agent.transfer.plan import leading
from worker_agent.transfer.slots import MemorySlots
from worker_agent.transfer.stored_tier import StoredTier

TOKEN = b"of a benchmark"
BLOCK_BYTES = 2 << 20
WORKER_ID = 1


class PeerWorld:
    """A process that has blocks of 2 MiB, and room for them here."""

    def __init__(self, blocks: int) -> None:
        self.size_bytes = blocks * BLOCK_BYTES
        self._blocks = blocks
        self._layout = _layout(blocks, host_memory(self.size_bytes))
        self._window = BlockWindow(self._layout)
        self._key = AES(bytes(16))
        self._names = [_name(number).identity for number in range(blocks)]

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        here = Path(__file__)
        arguments = [sys.executable, str(here), str(self._blocks)]
        environment = {"PYTHONPATH": ":".join([str(here.parents[1]), *sys.path])}
        self._process = subprocess.Popen(arguments, stdin=-1, stdout=-1, text=True, env=environment)
        plain, *ways = (self._process.stdout.readline().strip() for _ in range(5))
        host, port = plain.split(":")
        self._plain = socket.create_connection((host, int(port)))
        self._plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        over_tcp, local, with_tls, authorities = ways
        self._nixl = NixlMemory([])
        self._over_tcp = PeerClient(over_tcp, WORKER_ID, TOKEN)
        self._mapped = PeerClient(local, WORKER_ID, TOKEN)
        self._with_tls = PeerClient(with_tls, WORKER_ID, TOKEN, tls=ClientTls(authorities))
        self._through_nixl = PeerClient(over_tcp, WORKER_ID, TOKEN, nixl=self._nixl)
        self._source = torch.ones(self.size_bytes, dtype=torch.uint8)
        return self

    def __exit__(self, *_: object) -> None:
        self._plain.close()
        self._over_tcp.close()
        self._mapped.close()
        self._with_tls.close()
        self._through_nixl.close()
        self._nixl.close()
        self._process.communicate()  # it ends with its input

    def get_plainly(self) -> None:
        """Every byte to where it belongs, and one pass of the tag over it in the cache."""
        self._plain.sendall(b"x")
        for number, view in enumerate(self._window.incoming(range(self._blocks)).views):
            tag = Tag(self._key, number)
            while len(view):
                count = self._plain.recv_into(view)
                tag.add(view[:count])
                view = view[count:]
            tag.value()

    def get(self) -> None:
        self._get(self._over_tcp)

    def get_with_tls(self) -> None:
        self._get(self._with_tls)

    def copy_plainly(self) -> None:
        """As many bytes, from one memory of this process to another."""
        self._layout.regions[0].copy_(self._source)

    def get_mapped(self) -> None:
        self._get(self._mapped)

    def get_through_nixl(self) -> None:
        """Without a network of RDMA: through memory that UCX shares between the processes."""
        self._get(self._through_nixl)
        assert not self._nixl.counters.failed_reads

    def _get(self, client: PeerClient) -> None:
        room = self._window.incoming(range(self._blocks))
        assert leading(client.get_named(self._names, room)) == self._blocks


def _name(number: int) -> BlockName:
    return BlockName(number.to_bytes(16, "little"), number)


def _layout(blocks: int, memory: MemoryStorage) -> PhysicalLayout:
    config = LayoutConfig(blocks, 32, 2, 16, BLOCK_BYTES // (32 * 2 * 16 * 2))
    return physical("1").configured(config).laid_out(LayoutKind.CONTIGUOUS).over_memory([memory])


def main() -> None:
    count = int(sys.argv[1])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory) / "memory"
        memory = shared_memory(MappedFile(path, count * BLOCK_BYTES))
        layout = _layout(count, memory)
        pool, names = SharedPool(count, LruEviction()), list(map(_name, range(count)))
        tier = StoredTier(pool, MemorySlots(memory, count))
        for name in names:
            tier.store([name], torch.randint(0, 256, (1, BLOCK_BYTES), dtype=torch.uint8))
        window = BlockWindow(layout)
        listener = socket.create_server(("127.0.0.1", 0))
        Thread(target=_serve_plainly, args=(listener, window, count), daemon=True).start()
        sets = {0: SharedSet(pool, window, path, tier.proof)}
        nixl = NixlMemory([window])
        server = PeerServer(
            Leases(Rank(WORKER_ID, 0), 1),
            sets,
            TOKEN,
            path=Path(directory) / "socket",
            nixl=nixl,
        )
        tls, authorities = _certified(Path(directory))
        with_tls = PeerServer(Leases(Rank(WORKER_ID, 0), 1), sets, TOKEN, tls=tls)
        ways = (*server.addresses, *with_tls.addresses, authorities)
        print("{}:{}".format(*listener.getsockname()), *ways, sep="\n", flush=True)
        sys.stdin.read()
        server.close(60)
        with_tls.close(60)
        nixl.close()


def _certified(folder: Path) -> tuple[ssl.SSLContext, str]:
    """Return a server's context, and the file of those who vouch for it."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.processes.certificates import Authority

    authority = Authority(folder)
    return ServerTls(*authority.issue("worker"), "").context, str(authority.path)


def _serve_plainly(listener: socket.socket, window: BlockWindow, count: int) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(1):
        for view in window.outgoing(range(count)):
            connection.sendall(view)


if __name__ == "__main__":
    main()
