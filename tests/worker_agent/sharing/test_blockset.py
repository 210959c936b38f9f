"""Blocks of other workers: what is exported, imported, listed, and refused."""

import pytest
from msgspec.structs import replace

from router.protocol.values import Rank
from worker_agent.blocks.descriptors import BlockDescriptorList, Mutability
from worker_agent.blocks.eviction.simple import LruEviction
from worker_agent.blocks.handles import Tier
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.descriptor import AgentMetadata, described
from worker_agent.layout.layout import Layout, MemoryRegion
from worker_agent.layout.strides import LayoutKind
from worker_agent.sharing.blockset import (
    BlocksetExport,
    Imported,
    ImportOutcome,
    RemoteBlocksets,
    check_put,
    decode,
    described_blocks,
    encode,
)
from worker_agent.sharing.errors import BlocksetError
from worker_agent.sharing.leases import Leases
from worker_agent.transfer.errors import TransferError

CONFIG = LayoutConfig(16, 3, 2, 4, 16)
MUTABLE, IMMUTABLE = Mutability.MUTABLE, Mutability.IMMUTABLE


def set_of(memory="DRAM", agent="1337", config=CONFIG):
    layout = Layout(config, LayoutKind.CONTIGUOUS, [MemoryRegion(4096, config.required_bytes)])
    return described(layout, "System", AgentMetadata(agent, memory, 0))


EXPORT = BlocksetExport(1337, 5, 30.0, 77, {0: set_of("VRAM"), 1: set_of()}, ["tcp://h:1"])
LISTED = BlockDescriptorList(1337, 1, MUTABLE, (3, 4), "secret", 5)


def importer(*exports):
    blocksets = RemoteBlocksets(Rank(1338, 0), 77, CONFIG)
    for export in exports:
        blocksets.import_remote_blockset(encode(export), 0.0)
    return blocksets


def test_exported_blocks_are_imported():
    blocks = importer(EXPORT).get_remote_blocks_mutable(encode(LISTED), 1.0)
    assert (blocks.listed, blocks.config, blocks.addresses) == (LISTED, CONFIG, ("tcp://h:1",))
    assert blocks.is_mutable
    assert decode(encode(EXPORT), BlocksetExport) == EXPORT


def test_repeated_import_is_ignored_and_an_older_life_refused():
    blocksets = importer(EXPORT)
    same = replace(EXPORT, addresses=["tcp://other:1"])
    assert blocksets.import_remote_blockset(encode(same), 20.0).imported is Imported.RENEWED
    kept = blocksets.get_remote_blocks_immutable(encode(LISTED), 49.0)
    assert kept.addresses == ("tcp://h:1",)
    later = replace(EXPORT, epoch=6)
    assert blocksets.import_remote_blockset(encode(later), 21.0).imported is Imported.REPLACED
    with pytest.raises(BlocksetError, match=r"epoch: 5 \(allowed: 6\)"):
        blocksets.get_remote_blocks_immutable(encode(LISTED), 22.0)
    with pytest.raises(BlocksetError, match=r"epoch: 5 \(allowed: 6, or a later one\)") as older:
        blocksets.import_remote_blockset(encode(EXPORT), 22.0)
    assert older.value.rule == "older_epoch"
    assert len(blocksets) == 1


def test_only_memory_blocks_are_imported():
    export = replace(EXPORT, block_sets={**EXPORT.block_sets, 2: set_of("FILE")})
    blocksets = importer()
    outcome = blocksets.import_remote_blockset(encode(export), 0.0)
    assert outcome == ImportOutcome(Imported.NEW, [2])
    with pytest.raises(BlocksetError, match="set 2") as unknown:
        blocksets.get_remote_blocks_immutable(encode(replace(LISTED, block_set_idx=2)), 0.0)
    assert unknown.value.rule == "unknown_set"


@pytest.mark.parametrize(
    ("change", "rule", "said"),
    [
        ({"worker_id": 1338}, "import_from_self", "cannot import blockset from self"),
        ({"fingerprint": 78}, "other_model", "fingerprint: 4e"),
        ({"block_sets": {0: set_of(agent="9")}}, "other_agent", r"block_sets\[0\]: 9"),
        ({"block_sets": {0: set_of(config=replace(CONFIG, num_layers=4))}}, "other_layout", "like"),
    ],
)
def test_invalid_exports_are_refused(change, rule, said):
    blocksets = importer()
    with pytest.raises(BlocksetError, match=said) as refused:
        blocksets.import_remote_blockset(encode(replace(EXPORT, **change)), 0.0)
    assert refused.value.rule == rule
    assert len(blocksets) == 0


@pytest.mark.parametrize(
    ("change", "now_s", "rule"),
    [
        ({"worker_id": 9}, 0.0, "unknown_worker"),
        ({"block_set_idx": 7}, 0.0, "unknown_set"),
        ({"block_indices": (16,)}, 0.0, "block_out_of_bounds"),
        ({"block_indices": (-1,)}, 0.0, "block_out_of_bounds"),
        ({"block_indices": ()}, 0.0, "empty_input"),
        ({"epoch": 4}, 0.0, "other_epoch"),
        ({"mutability": IMMUTABLE}, 0.0, "immutable"),
        ({}, 30.0, "lease_expired"),
    ],
)
def test_invalid_lists_are_refused(change, now_s, rule):
    with pytest.raises(BlocksetError) as refused:
        importer(EXPORT).get_remote_blocks_mutable(encode(replace(LISTED, **change)), now_s)
    assert refused.value.rule == rule


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[1]", b" " * 2_000_000])
def test_invalid_bytes_are_refused(data):
    with pytest.raises(BlocksetError) as refused:
        importer().import_remote_blockset(data, 0.0)
    assert refused.value.rule == "serialization_error"


def test_immutable_blocks_may_be_read_but_not_written():
    listed = encode(replace(LISTED, mutability=IMMUTABLE))
    assert not importer(EXPORT).get_remote_blocks_immutable(listed, 0.0).is_mutable
    with pytest.raises(BlocksetError, match="cannot get mutable remote blocks for immutable"):
        importer(EXPORT).get_remote_blocks_mutable(listed, 0.0)


@pytest.mark.parametrize(
    ("sources", "targets", "rule"),
    [
        ({"block_indices": ()}, {}, "no_blocks_provided"),
        ({"block_indices": (1,)}, {}, "count_mismatch"),
        ({}, {"mutability": IMMUTABLE}, "immutable_target"),
        ({}, {"block_indices": (5, 5)}, "duplicate_destination_blocks"),
        ({}, {}, "overlapping"),
        ({}, {"block_indices": (4, 5)}, "overlapping"),
    ],
)
def test_invalid_puts_are_refused(sources, targets, rule):
    with pytest.raises(TransferError) as refused:
        check_put(replace(LISTED, **sources), replace(LISTED, **targets))
    assert refused.value.rule == rule


def test_the_same_numbers_of_others_are_other_blocks_and_a_source_may_be_there_twice():
    check_put(replace(LISTED, block_indices=(3, 3)), replace(LISTED, block_set_idx=0))
    check_put(LISTED, replace(LISTED, worker_id=1338))


# ── Leases ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tier():
    return Tier(BlockPool(8, LruEviction()))


def named(number):
    return BlockName(bytes([number]) * 16, number)


def rule_of(leases, listed, now_s=0.0, *, is_write=False):
    """Why they may not be used; None if they may."""
    try:
        with leases.use(listed, now_s, is_write=is_write):
            return None
    except BlocksetError as error:
        return error.rule


def test_a_lease_lets_use_its_blocks_until_it_ends(tier):
    leases = Leases(Rank(1337, 0), 5)
    listed = leases.grant(tier.allocate(2), 1, "name", 10.0)
    assert (listed.mutability, listed.lease, listed.epoch) == (MUTABLE, "name", 5)
    assert rule_of(leases, listed, is_write=True) is None
    assert rule_of(leases, listed, 9.9) is None
    assert rule_of(leases, listed, 10.0) == "lease_expired"
    assert leases.expire(10.0) == 1
    assert rule_of(leases, listed) == "lease_unknown"
    assert tier.pool.used_blocks == 0


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"worker_id": 1}, "other_epoch"),
        ({"dp_rank": 1}, "other_epoch"),
        ({"epoch": 4}, "other_epoch"),
        ({"lease": "guess"}, "lease_unknown"),
        ({"block_set_idx": 0}, "not_leased"),
        ({"block_indices": (0, 7)}, "not_leased"),
        ({"block_indices": (0, 0)}, "duplicate_destination_blocks"),
    ],
)
def test_the_owner_decides_what_is_leased(tier, change, rule):
    leases = Leases(Rank(1337, 0), 5)
    listed = leases.grant(tier.allocate(2), 1, "name", 10.0)
    assert rule_of(leases, replace(listed, **change), is_write=True) == rule


def test_immutable_blocks_are_never_written(tier):
    leases = Leases(Rank(1337, 0), 5)
    handle = tier.allocate(1).register([named(1)])
    listed = leases.grant(handle, 1, "name", 10.0)
    lying = replace(listed, mutability=MUTABLE)
    assert rule_of(leases, lying, is_write=True) == "immutable"
    assert rule_of(leases, lying) is None


def test_blocks_in_use_outlive_their_lease(tier):
    leases = Leases(Rank(1337, 0), 5)
    listed = leases.grant(tier.allocate(2), 1, "name", 10.0)
    with leases.use(listed, 9.0, is_write=True), leases.use(listed, 9.0, is_write=False):
        with pytest.raises(BlocksetError, match="in use"):
            leases.take_back("name")
        leases.expire(20.0)
        leases.revoke("name")
        assert tier.pool.used_blocks == 2
    assert tier.pool.used_blocks == 0


def test_written_blocks_return_to_their_owner(tier):
    leases = Leases(Rank(1337, 0), 5)
    leases.grant(tier.allocate(1), 1, "name", 10.0)
    leases.take_back("name").register([named(1)]).release()
    assert tier.pool.matching([named(1).identity]) == 1
    assert len(leases) == 0


def test_recipients_end_leases_to_read_and_owners_those_to_write(tier):
    leases = Leases(Rank(1337, 0), 5)
    leases.grant(tier.allocate(1).register([named(1)]), 1, "read", 10.0)
    written = leases.grant(tier.allocate(2), 1, "write", 10.0)
    for name in ("read", "write", "guess", "read"):
        leases.end(name)
    assert (len(leases), leases.leased_blocks(1), leases.counters.ended) == (1, 2, 1)
    assert rule_of(leases, written, is_write=True) is None
    leases.close()
    assert tier.pool.used_blocks == 0


def test_only_held_blocks_are_described(tier):
    handle = tier.allocate(1)
    handle.release()
    with pytest.raises(BlocksetError) as released:
        described_blocks(handle, Rank(1, 0), 0)
    with pytest.raises(BlocksetError) as empty:
        described_blocks(tier.match([]), Rank(1, 0), 0)
    assert (released.value.rule, empty.value.rule) == ("invalid_block_handle", "empty_input")
