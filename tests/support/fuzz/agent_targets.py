"""Parsers of what agents read: of each other, of block managers, and from disk."""

import socket
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from router.errors import WireError
from router.protocol.events import CLEARED, REMOVED, STORED
from router.protocol.values import SCHEME, Identity, Rank, Tier
from router.publisher.feed.tier_feed import TierFeed
from router.publisher.feed.tier_wire import (
    HEAD_WORDS,
    LENGTH,
    VERSION,
    Held,
    Hello,
    TierEvent,
    TierEvents,
    decode,
    encode,
    paths_of,
    unpacked,
)
from router.publisher.journal.consolidator import JournalConsolidator
from router.publisher.journal.journal import EventJournal
from support.fuzz.target import Target, scratch_folder
from worker_agent.blocks.descriptors import BlockDescriptorList, Mutability
from worker_agent.blocks.names import BlockName
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.descriptor import (
    AgentMetadata,
    decode_descriptor,
    described,
    encode_descriptor,
)
from worker_agent.layout.errors import LayoutError, RegionError
from worker_agent.layout.layout import Layout, MemoryRegion
from worker_agent.layout.strides import LayoutKind, required_allocations
from worker_agent.sharing import blockset
from worker_agent.sharing.blockset import (
    BlocksetExport,
    RemoteBlocksets,
)
from worker_agent.sharing.errors import BlocksetError, PeerError
from worker_agent.sharing.peer_messages import (
    Challenge,
    End,
    Find,
    Found,
    Get,
    GetNamed,
    Go,
    Mapped,
    PeerRefused,
    Proof,
    Put,
    Released,
    Request,
    Sent,
    Taken,
    Welcome,
    Written,
)
from worker_agent.sharing.peer_wire import (
    Line,
)
from worker_agent.storage.journal import SlotJournal
from worker_agent.storage.seals import BlockSeals

IDENTITY = Identity(SCHEME, 16)
CONFIG = LayoutConfig(num_blocks=8, num_layers=3, outer_dim=2, page_size=4, inner_dim=16)
TOKEN, NONCES = b"token", bytes(64)
_LISTED = BlockDescriptorList(1, 0, Mutability.IMMUTABLE, (0, 1, 7), "lease", 1)

HANDSHAKE = [Challenge(1, bytes(32)), Proof(bytes(32), bytes(32)), Welcome(bytes(32))]
_NAMED = [bytes(16), b"x" * 16]
REQUESTS = [
    Get(_LISTED, True), Get(_LISTED, True, _NAMED), GetNamed(_NAMED), Put(_LISTED), Find(_NAMED),
    End("lease"),
]  # fmt: skip
REPLIES = [
    Sent([1], 768), Mapped([0], 768, 0, 8192, [0, 768], {0: 7}, True), Taken(), Go(768),
    Written([2]), Released(), Found([0, 1]), PeerRefused("rule", "reason é"),
]  # fmt: skip


# ── The protocol of peers ────────────────────────────────────────────────────────────────────────


def _framed(data):
    return LENGTH.pack(len(data)) + data


def _received(data, kind, *, is_authenticated=False):
    """The messages that a side receives before the other one closes the connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        theirs.send(data)
        theirs.close()
        line = Line(ours, "peer", time.monotonic() + 5.0)
        if is_authenticated:
            line.authenticate(TOKEN, NONCES, is_client=False)
        messages = []
        while (message := line.receive_or_end(kind)) is not None:
            messages.append(message)
        return messages


def _peer_messages(kind):
    def check(data):
        [message] = _received(_framed(data), kind)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message

    return lambda: check


def _peer_seeds(messages):
    return lambda: [msgspec.msgpack.encode(each) for each in messages]


def _tagged(messages):
    """What a client sends after the greeting."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours, "peer", time.monotonic() + 5.0)
        line.authenticate(TOKEN, NONCES, is_client=True)
        for message in messages:
            line.send(message)
        return theirs.recv(1 << 16)


def _peer_tags(data):
    """Of changed bytes nothing is accepted but what came before the change."""
    sent = [[*REQUESTS], [REQUESTS[1], REQUESTS[0]]]
    try:
        messages = _received(data[: 1 << 16], Get | GetNamed | Put, is_authenticated=True)
    except PeerError:
        return
    assert any(messages == each[: len(messages)] for each in sent)


# ── Descriptions of blocks ───────────────────────────────────────────────────────────────────────


def _descriptors():
    kinds = (LayoutKind.CONTIGUOUS, LayoutKind.BLOCK_FIRST, LayoutKind.BLOCK_SECOND)
    for kind in kinds:
        sizes = required_allocations(CONFIG, kind)
        regions = [MemoryRegion(2**62 + 2**20 * i, size) for i, size in enumerate(sizes)]
        yield described(Layout(CONFIG, kind, regions), "System", AgentMetadata("1", "DRAM", 0))


def _descriptor_seeds():
    return [encode_descriptor(each) for each in _descriptors()]


def _read_descriptor(data):
    descriptor = decode_descriptor(data)
    assert decode_descriptor(encode_descriptor(descriptor)) == descriptor
    config = descriptor.layout_config
    last = config.num_blocks - 1, config.num_layers - 1, config.outer_dim - 1
    region = descriptor.layout().memory_region(*last)
    assert any(
        each.addr <= region.address and region.end <= each.addr + each.size
        for each in descriptor.memory_descriptors
    )


def _blockset_seeds():
    sets = dict(enumerate(_descriptors()))
    export = BlocksetExport(2, 1, 30.0, 7, sets, ["tcp://127.0.0.1:1", "unix:///a"])
    return [blockset.encode(export), blockset.encode(_LISTED)]


def _blocksets(data):
    """Another worker's blocks are imported, or refused without an effect."""
    known = RemoteBlocksets(Rank(1, 0), 7, CONFIG)
    try:
        known.import_remote_blockset(data, 0.0)
    except BlocksetError:
        assert len(known) == 0
    listed = blockset.decode(data, BlockDescriptorList)
    assert blockset.decode(blockset.encode(listed), BlockDescriptorList) == listed


# ── Tiers of a block manager ─────────────────────────────────────────────────────────────────────

_HASHES = np.array([11, 22, 33], np.uint64)
_HEADS = np.array([0, 0, 0, 2, 11, 1], np.uint64)


def _tier_seeds():
    paths, none = paths_of(_HASHES, _HEADS), paths_of(_HASHES[:0], _HEADS[:0])
    events = [
        TierEvent(STORED, Tier.HOST, paths),
        TierEvent(REMOVED, Tier.HOST, paths_of(_HASHES, _HEADS[:0])),
        TierEvent(CLEARED, Tier.DISK, none),
    ]
    messages = [
        Hello(VERSION, IDENTITY, 0), Held(Tier.HOST, paths), Held(Tier.DISK, none),
        TierEvents(events, True), TierEvents([], False),
    ]  # fmt: skip
    return [encode(each)[LENGTH.size :] for each in messages]


class TierMessages:
    """A feed takes what a block manager sends after its greeting and its snapshot."""

    def __call__(self, data):
        message = decode(data)
        assert decode(encode(message)[LENGTH.size :]) == message
        for paths in _paths_in(message):
            _check_paths(paths)
        for is_current in (False, True):
            feed = TierFeed(JournalConsolidator(EventJournal(Rank(1, 0), 1, IDENTITY)).source(), 0)
            feed.take(Hello(VERSION, IDENTITY, 0))
            if is_current:
                feed.take(TierEvents([], True))
            feed.take(message)


def _paths_in(message):
    if isinstance(message, Held):
        return [message.paths]
    return [each.paths for each in message.events] if isinstance(message, TierEvents) else []


def _check_paths(paths):
    hashes, heads = unpacked(paths)
    firsts = heads[::HEAD_WORDS].tolist()
    assert firsts == sorted(set(firsts))
    assert not firsts or (firsts[0] == 0 and firsts[-1] < len(hashes))


# ── Disk, and the shared store ───────────────────────────────────────────────────────────────────

_SLOTS = 3
_NAMES = [BlockName(bytes(16), 7), BlockName(b"x" * 16, 2**64 - 1, bytes(16), 7)]


class SlotJournals:
    """Of a changed file only whole records are read."""

    def __init__(self):
        self._path = scratch_folder(self) / "slots"
        self._written = _slots(self._path)

    def __call__(self, data):
        self._path.write_bytes(data)
        journal = SlotJournal(self._path, _SLOTS, 1)
        entries = journal.entries(journal.written())
        journal.close()
        assert all(entry in self._written for entry in entries)


def _slots(path):
    journal = SlotJournal(path, _SLOTS, 1)
    for slot, name in enumerate(_NAMES):
        journal.commit(slot, name, slot)
    entries = journal.entries(journal.written())
    journal.close()
    return entries


def _slot_seeds():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slots"
        _slots(path)
        return [path.read_bytes()]


def _seals(data):
    """No other bytes, and no other seal, are right."""
    secret, identity = b"s" * 32, bytes(16)
    seals = BlockSeals(secret)
    size_bytes = min(len(data), 28)
    seal, block = data[:size_bytes], data[size_bytes:]
    assert not seals.is_right(identity, memoryview(block), seal) or data in _SEALED
    BlockSeals().is_right(identity, memoryview(block), seal)


_SEALED = [
    bytes.fromhex("88439ede1dd461e9d81b0d5fa81740046ba8590d11a0b8fe8661fb1e"),
    bytes.fromhex("48dfebb2c13102bb7d73d2c3b2153bb9c7a22560ec68dc3be98515ac626c6f636b"),
]
"""Blocks behind their seals: a seal has a random nonce, so it is not made anew."""

TARGETS = [
    Target(
        "peer_handshake", _peer_messages(Challenge | Proof | Welcome | PeerRefused),
        _peer_seeds(HANDSHAKE), (PeerError,), "msgpack",
    ),
    Target(
        "peer_requests", _peer_messages(Request), _peer_seeds(REQUESTS),
        (PeerError,), "msgpack",
    ),
    Target(
        "peer_replies",
        _peer_messages(Sent | Mapped | Taken | Released | Found | Go | Written | PeerRefused),
        _peer_seeds(REPLIES), (PeerError,), "msgpack",
    ),
    Target(
        "peer_tags", lambda: _peer_tags, lambda: [_tagged(REQUESTS), _tagged(REQUESTS[1::-1])]
    ),
    Target(
        "descriptors", lambda: _read_descriptor, _descriptor_seeds, (LayoutError, RegionError),
        "json",
    ),
    Target("blocksets", lambda: _blocksets, _blockset_seeds, (BlocksetError,), "json"),
    Target("tier_messages", TierMessages, _tier_seeds, (WireError,), "msgpack"),
    Target("slot_journals", SlotJournals, _slot_seeds),
    Target("seals", lambda: _seals, lambda: [*_SEALED]),
]  # fmt: skip
