"""Blocks in a file, read three ways: plainly, as a tier does, and with checksums."""

import os
from pathlib import Path

import torch

from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.manager.tier_blocks import DISK_THREADS
from worker_agent.storage.disk import DiskStorage
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.pipeline import batches_of
from worker_agent.transfer.plan import leading
from worker_agent.transfer.slots import DiskSlots, aligned_rows
from worker_agent.transfer.stored_tier import StoredTier

BLOCK_BYTES = 2**20
BATCH = 16


class DiskWorld:
    """Return a store of blocks in a file of `directory`."""

    def __init__(self, directory: Path, blocks: int) -> None:
        self.size_bytes = blocks * BLOCK_BYTES
        self._disk = DiskStorage(directory / "blocks", blocks, BLOCK_BYTES)
        self._slots = DiskSlots(self._disk, BLOCK_BYTES, BATCH)
        io = IoThreads("disk", timeout_s=600, count=DISK_THREADS)
        self._tier = StoredTier(BlockPool(blocks, LineageEviction()), self._slots, io=io)
        self._identities = [number.to_bytes(16, "little") for number in range(blocks)]
        self._rows = aligned_rows(blocks, BLOCK_BYTES)
        self._rows.copy_(torch.randint(0, 256, (blocks, BLOCK_BYTES), dtype=torch.uint8))
        names = [BlockName(identity, 0) for identity in self._identities]
        assert leading(self._tier.store(names, self._rows)) == blocks
        flags = os.O_RDONLY | (os.O_DIRECT if self._disk.abilities.is_direct else 0)
        self._plain = os.open(directory / "blocks", flags)
        self._memory = self._rows.view(-1).numpy().data

    def read_plainly(self) -> None:
        """As large pieces as ours, to the same memory."""
        for offset in range(0, self.size_bytes, BATCH * BLOCK_BYTES):
            os.preadv(self._plain, [self._memory[offset : offset + BATCH * BLOCK_BYTES]], offset)

    def read(self) -> None:
        for batch in batches_of(len(self._rows), BATCH):
            assert not any(self._slots.read(batch, list(self._rows[batch.start : batch.stop])))

    def load(self) -> None:
        assert leading(self._tier.load(self._identities, self._rows)) == len(self._identities)

    def close(self) -> None:
        os.close(self._plain)
        self._tier.close()
