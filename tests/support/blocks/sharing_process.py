"""A worker in a process of its own that shares its blocks: lines in, lines out.

    python sharing_process.py WORKER_ID

First it says its export. Then `hear EXPORT`, `lease` (four host blocks: their list), `put LIST`
(four host blocks of its own, filled from its worker id on, into those), `read` (digests of the
leased), `same LIST` (a put onto the same blocks), `local` (two blocks onto two others).
"""

import sys
from hashlib import sha256

from worker_agent.blocks.descriptors import BlockDescriptorList
from worker_agent.manager.config import (
    BlockManagerConfig,
    CacheModel,
    OnDevice,
    OnHost,
    RuntimeConfig,
    TierLayout,
)
from worker_agent.manager.manager import KvBlockManager
from worker_agent.sharing.blockset import check_put, decode, encode
from worker_agent.sharing.sharing import BlockSharing, SharingConfig
from worker_agent.transfer.block_window import BlockWindow
from worker_agent.transfer.errors import TransferError

MODEL = CacheModel(num_layers=3, page_size=4, inner_dim=16)
TOKEN = b"of the deployment"


def config_of(worker_id, model=MODEL, host=None):
    """Three layers, page 4, inner 16; 16 host and 8 device blocks."""
    return BlockManagerConfig(
        runtime=RuntimeConfig(worker_id=worker_id),
        model=model,
        device=TierLayout(num_blocks=8, place=OnDevice()),
        host=TierLayout(num_blocks=16, place=host or OnHost(is_pinned=False)),
    )


def shared(manager, *, epoch=1, model=MODEL, path=None, max_leased_blocks=16, **options):
    config = SharingConfig(token=TOKEN, epoch=epoch, path=path, max_leased_blocks=max_leased_blocks)
    return BlockSharing(manager, model, config, **options)


class Bytes:
    """The bytes of a manager's blocks of one level."""

    def __init__(self, manager, tier):
        [each] = [s for s in manager.block_sets().values() if s.blocks is tier]
        self._window = BlockWindow(each.memory.physical)

    def fill(self, blocks, seed):
        room = self._window.incoming(blocks)
        for place, view in enumerate(room.views):
            view[:] = bytes((seed + place + i) % 256 for i in range(len(view)))
        room.landed(list(range(len(blocks))))

    def digests(self, blocks):
        return [sha256(view).hexdigest() for view in self._window.outgoing(blocks)]


def main():
    worker_id = int(sys.argv[1])
    with KvBlockManager(config_of(worker_id)) as manager:
        sharing = shared(manager)
        say(sharing.export_local_blockset().decode())
        worker = Commanded(manager, sharing)
        for line in sys.stdin:
            command, _, rest = line.strip().partition(" ")
            say(getattr(worker, command)(rest.encode()))
        sharing.close(60)


class Commanded:
    """The commands that it takes: the answer to each is a line."""

    def __init__(self, manager, sharing):
        self.host = manager.host()
        self.sharing = sharing
        self.bytes = Bytes(manager, manager.host())
        self.leased = None

    def hear(self, export):
        return self.sharing.import_remote_blockset(export).imported

    def lease(self, _):
        self.leased = self.sharing.lease(self.host.allocate(4), 600.0)
        return encode(self.leased).decode()

    def put(self, listed):
        with self.host.allocate(4) as sources:
            self.bytes.fill(sources.block_ids, self.sharing.rank.worker_id)
            targets = self.sharing.get_remote_blocks_mutable(listed)
            return " ".join(self.sharing.put(sources, targets))

    def same(self, listed):
        return put_onto_itself(decode(listed, BlockDescriptorList))

    def local(self, _):
        with self.host.allocate(2) as first, self.host.allocate(2) as last:
            self.bytes.fill(first.block_ids, 77)
            self.sharing.copy(first, last)
            return str(self.bytes.digests(first.block_ids) == self.bytes.digests(last.block_ids))

    def read(self, _):
        return " ".join(self.bytes.digests(self.leased.block_indices))


def put_onto_itself(listed):
    try:
        check_put(listed, listed)
    except TransferError as error:
        return error.rule
    return "allowed"


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
