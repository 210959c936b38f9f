"""Stacks of real tiers for tests: memory and a file, with journals, over one directory."""

import torch

from router.protocol.values import Tier
from worker_agent.blocks.eviction.lineage import LineageEviction
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.offload.policies import PassAll
from worker_agent.storage.disk import DiskStorage
from worker_agent.storage.journal import SlotJournal
from worker_agent.storage.mapped_file import MappedFile
from worker_agent.storage.memory import shared_memory
from worker_agent.storage.remote import RemoteSettings, RemoteStorage, redis_client
from worker_agent.tiers.level import Level, StackSettings
from worker_agent.tiers.stack import TierStack
from worker_agent.transfer.remote_tier import RemoteTier
from worker_agent.transfer.slots import DiskSlots, MemorySlots
from worker_agent.transfer.stored_tier import StoredTier

BLOCK_BYTES = 1000
FOREVER_S = 1e9


def name(number):
    """Block `number` of a prompt whose blocks are numbered on."""
    identity = number.to_bytes(16, "little")
    if not number:
        return BlockName(identity, number)
    return BlockName(identity, number, (number - 1).to_bytes(16, "little"), number - 1)


def identities(*numbers):
    return [name(number).identity for number in numbers]


def rows(*numbers):
    """The bytes of blocks, each of its number."""
    return torch.stack(
        [(torch.arange(BLOCK_BYTES) * (number + 1) % 251).to(torch.uint8) for number in numbers]
    )


def host(directory, num_blocks, block_bytes=BLOCK_BYTES):
    memory = shared_memory(MappedFile(directory / "host", num_blocks * block_bytes))
    journal = SlotJournal(directory / "host.journal", num_blocks, fingerprint=1)
    slots = MemorySlots(memory, num_blocks)
    return StoredTier(BlockPool(num_blocks, LineageEviction()), slots, journal)


def disk(directory, num_blocks, block_bytes=BLOCK_BYTES, io=None):
    storage = DiskStorage(directory / "disk", num_blocks, block_bytes)
    journal = SlotJournal(directory / "disk.journal", num_blocks, fingerprint=1)
    slots = DiskSlots(storage, block_bytes, batch_blocks=4)
    return StoredTier(BlockPool(num_blocks, LineageEviction()), slots, journal, io=io)


def remote(port, block_bytes=BLOCK_BYTES, max_blocks=1000, timeout_s=30.0):
    settings = RemoteSettings("ns", "model", "worker-1", block_bytes, max_blocks, ttl_s=600.0)
    client = redis_client(f"redis://127.0.0.1:{port}", timeout_s)
    return RemoteTier(RemoteStorage(client, settings), settings)


def level(tier, store):
    return Level(tier, store, PassAll(), is_shared=tier is Tier.REMOTE)


class Stacked:
    """A stack, and its owner: one that holds every block there is on its device."""

    def __init__(self, *levels, worth=None, **settings):
        fields = {"batch_blocks": 3, **settings}
        self.levels = [
            each if isinstance(each, Level) else level(tier, each)
            for tier, each in zip((Tier.HOST, Tier.DISK, Tier.REMOTE), levels, strict=False)
        ]
        self.stack = TierStack(self.levels, StackSettings(BLOCK_BYTES, **fields), worth)
        self.changes = []
        self.now_s = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self.stack.close(60)

    def poll(self):
        self.now_s += 0.01
        self.changes += self.stack.poll(self.now_s)
        self.stack.check_invariants()

    def step(self):
        """As an engine does between two steps."""
        self.poll()
        waiting = self.stack.due(self.now_s)
        if waiting:
            numbers = [each.name.sequence_hash for each in waiting]
            self.stack.store(waiting, rows(*numbers))

    def settle(self):
        """Until nothing moves any more: a call behind all others has come back from each tier."""
        quiet = 0
        while quiet < 2:
            before = self.stack.status()
            self.step()
            for level, status in zip(self.levels, before, strict=True):
                if not status.is_broken:
                    self.stack.call(level.tier, lambda _: None).result(60)
            self.poll()
            quiet = quiet + 1 if _shown(before) == _shown(self.stack.status()) else 0

    def offer(self, *numbers, **fields):
        self.stack.offer([name(number) for number in numbers], **fields)
        self.settle()

    def load(self, *numbers, timeout_s=FOREVER_S, **fields):
        """How many came, each of them right."""
        loading = self.stack.load(identities(*numbers), self.now_s, timeout_s, **fields)
        if loading is None:
            return 0
        while not loading.is_done:
            self.stack.call(self.levels[-1].tier, lambda _: None).result(60)
            self.poll()
        count = loading.usable_blocks
        assert not count or torch.equal(loading.rows[:count], rows(*numbers[:count]))
        return count

    def holds(self, tier, *numbers):
        return [bool(self.stack.held(each) >> tier & 1) for each in identities(*numbers)]

    def on(self, tier, run):
        answer = self.stack.call(tier, run).result(60)
        self.poll()
        return answer


def _shown(status):
    return repr(status)
