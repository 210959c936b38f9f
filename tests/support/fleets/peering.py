"""Workers that share blocks, for tests; also a process.

python peering.py WORKER_ID INNER_DIM [nixl]
"""

import select
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from xxhash import xxh3_64_intdigest

from router.protocol.values import Rank
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.handles import Tier
from worker_agent.blocks.names import BlockName
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.descriptor import AgentMetadata, described
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.shared_pool import SharedPool
from worker_agent.sharing.blockset import BlocksetExport, encode
from worker_agent.sharing.leases import Leases
from worker_agent.sharing.nixl_memory import NixlMemory
from worker_agent.sharing.peer_client import PeerClient
from worker_agent.sharing.peer_server import PeerServer
from worker_agent.sharing.shared_sets import SharedSet, no_proof
from worker_agent.transfer.block_window import BlockWindow
from worker_agent.transfer.physical import physical

TOKEN = b"of the deployment"
FOREVER_S = 1e12
DEVICE, HOST = 0, 1


def config_of(num_blocks, inner_dim=16):
    """Three layers, pages of four tokens."""
    return LayoutConfig(num_blocks, 3, 2, 4, inner_dim)


class Worker:
    """One worker's 8 device and 16 host blocks, served to peers with the token."""

    def __init__(self, worker_id, *, inner_dim=16, kinds=None, token=TOKEN, epoch=1,
                 proof=no_proof, nixl=False, **server):  # fmt: skip
        self.worker_id = worker_id
        self.kinds = kinds or {DEVICE: LayoutKind.BLOCK_FIRST, HOST: LayoutKind.CONTIGUOUS}
        self.layouts = {
            index: physical(str(worker_id))
            .configured(config_of(count, inner_dim))
            .laid_out(self.kinds[index])
            .allocated_on_host()
            for index, count in ((DEVICE, 8), (HOST, 16))
        }
        self.tiers = {
            index: Tier(SharedPool(layout.layout.config.num_blocks, LruEviction()))
            for index, layout in self.layouts.items()
        }
        self.windows = {index: BlockWindow(layout) for index, layout in self.layouts.items()}
        self.nixl = NixlMemory(self.windows.values()) if nixl else None
        self.leases = Leases(Rank(worker_id, server.pop("dp_rank", 0)), epoch)
        sets = {
            i: SharedSet(tier.pool, self.windows[i], proof=proof) for i, tier in self.tiers.items()
        }
        self.server = PeerServer(self.leases, sets, token, nixl=self.nixl, **server)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.close(60)
        if self.nixl is not None:
            self.nixl.close()

    def export(self):
        return encode(
            BlocksetExport(
                self.worker_id,
                self.leases.epoch,
                30.0,
                77,
                {
                    index: described(
                        each.layout,
                        "System",
                        AgentMetadata(str(self.worker_id), "DRAM" if index else "VRAM", 0),
                    )
                    for index, each in self.layouts.items()
                },
                self.server.addresses,
            )
        )

    def client(self, token=TOKEN, **options):
        """A client of this worker, over its last way."""
        return PeerClient(self.server.addresses[-1], self.worker_id, token, **options)

    def write(self, index, blocks, numbers):
        incoming = self.windows[index].incoming(blocks)
        for view, number in zip(incoming.views, numbers, strict=True):
            view[:] = content(number, len(view))
        incoming.landed(list(range(len(blocks))))

    def read(self, index, blocks):
        return [bytes(view) for view in self.windows[index].outgoing(blocks)]

    def keep(self, index, numbers):
        """Blocks that hold these, under their names."""
        handle = self.tiers[index].allocate(len(numbers))
        self.write(index, handle.block_ids, numbers)
        return handle.register([name(number) for number in numbers])


def name(number):
    return BlockName(number.to_bytes(16, "little"), number)


def identities(*numbers):
    return [name(number).identity for number in numbers]


def content(number, size_bytes=768):
    """The bytes of a block, each of its number."""
    pattern = bytes(place * (number + 1) % 251 for place in range(251))
    return (pattern * (size_bytes // 251 + 1))[:size_bytes]


def sealed(data):
    """As it is sent, but for the tag."""
    return data + xxh3_64_intdigest(data).to_bytes(8, "little")


@contextmanager
def changing(address, old, new):
    """An address that leads to another; bytes that come by are others then."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        relayed = threads.submit(_relay, server, _connected_to(address), old, new)
        yield "tcp://{}:{}".format(*server.getsockname())
        assert relayed.result(60)


def _relay(server, far, old, new):
    """Return whether the bytes came by."""
    has_changed = False
    with suppress(OSError), far, server.accept()[0] as near:
        pair, kept = {near: far, far: near}, {near: b"", far: b""}
        while True:
            for source in select.select(pair, [], [])[0]:
                received = source.recv(1 << 20)
                if not received:
                    return has_changed
                data = kept[source] + received
                has_changed = has_changed or old in data
                data = data.replace(old, new)
                # Of a few bytes, the end of another message may be alike: it would be kept forever.
                ends = (n for n in range(len(old) - 1, 7, -1) if data.endswith(old[:n]))
                begun = next(ends, 0)
                kept[source] = data[len(data) - begun :]
                pair[source].sendall(data[: len(data) - begun])
    return has_changed


def _connected_to(address):
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), 60)


class WorkerProcess:
    """A worker in a process of its own; `arguments`: after its id."""

    def __init__(self, *arguments):
        here = Path(__file__)
        command = [sys.executable, str(here), "1337", *map(str, arguments)]
        environment = {"PYTHONPATH": ":".join([str(here.parents[3]), *sys.path])}
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)
        self.export = self.process.stdout.readline().encode()
        self.listed = self.process.stdout.readline().encode()

    def read(self, *blocks):
        self.process.stdin.write(" ".join(map(str, blocks)) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def main():
    """A worker in a process of its own: says its export and a lease, and serves until it ends."""
    with Worker(
        int(sys.argv[1]), inner_dim=int(sys.argv[2]), nixl="nixl" in sys.argv, timeout_s=60
    ) as worker:
        blocks = worker.tiers[HOST].allocate(4)
        worker.write(HOST, blocks.block_ids, range(4))
        listed = worker.leases.grant(blocks, HOST, "lease", FOREVER_S)
        worker.keep(HOST, [7, 8])
        _say(worker.export().decode())
        _say(encode(listed).decode())
        for line in sys.stdin:
            blocks = worker.read(HOST, list(map(int, line.split())))
            _say(" ".join(sha256(data).hexdigest() for data in blocks))


def _say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
