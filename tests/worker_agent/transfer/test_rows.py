"""Blocks gathered and scattered: every byte where the layout says, and no other touched."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import RegionError
from worker_agent.layout.strides import LayoutKind, required_allocations
from worker_agent.storage.base import StorageKind
from worker_agent.storage.memory import MemoryStorage, host_memory
from worker_agent.transfer.physical import physical
from worker_agent.transfer.rows import Rows

NUM_BLOCKS = 5

configs = st.builds(
    LayoutConfig,
    num_blocks=st.just(NUM_BLOCKS),
    num_layers=st.integers(1, 3),
    outer_dim=st.integers(1, 2),
    page_size=st.sampled_from([1, 2, 8]),
    inner_dim=st.integers(1, 6),
    dtype_width_bytes=st.sampled_from([1, 2, 4]),
    alignment=st.sampled_from([1, 64]),
)
block_lists = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1)


def laid_out(config, kind, random_seed=0):
    """A layout over memory in which every byte is another's."""
    of = physical("1").configured(config).laid_out(kind).allocated_on_host()
    generator = torch.Generator().manual_seed(random_seed)
    for region in of.regions:
        region.copy_(torch.randint(0, 256, region.shape, dtype=torch.uint8, generator=generator))
    return of


def block_bytes(of, block):
    """A block as the layout says where it lies, piece by piece."""
    parts = []
    for layer in range(of.layout.config.num_layers):
        for outer in range(of.layout.config.outer_dim):
            place = of.layout.memory_region(block, layer, outer)
            region = of.regions[layer if of.layout.kind.is_layer_separate else 0]
            start = place.address - region.data_ptr()
            parts.append(region[start : start + place.size_bytes])
    return torch.cat(parts)


def rows_of(of, count):
    return Rows(of, torch.zeros((count, of.layout.config.block_bytes), dtype=torch.uint8))


@given(configs, st.sampled_from(LayoutKind), block_lists)
def test_a_gathered_row_is_the_block(config, kind, blocks):
    of = laid_out(config, kind)
    rows = rows_of(of, NUM_BLOCKS)
    rows.gather(blocks)
    for row, block in zip(rows.tensor, blocks, strict=False):
        assert torch.equal(row, block_bytes(of, block))
    assert not rows.tensor[len(blocks) :].any()


@given(configs, st.sampled_from(LayoutKind), block_lists)
def test_scattered_blocks_are_the_rows_and_no_other_byte_changes(config, kind, blocks):
    of, before = laid_out(config, kind), laid_out(config, kind)
    rows = rows_of(of, len(blocks))
    rows.tensor.copy_(torch.arange(rows.tensor.numel()).view(rows.tensor.shape) % 251)
    rows.scatter(blocks)
    for row, block in zip(rows.tensor, blocks, strict=True):
        assert torch.equal(row, block_bytes(of, block))
        for layer in range(config.num_layers):
            for outer in range(config.outer_dim):
                place = of.layout.memory_region(block, layer, outer)
                index = layer if kind.is_layer_separate else 0
                start = place.address - of.regions[index].data_ptr()
                end = start + place.size_bytes
                before.regions[index][start:end] = of.regions[index][start:end]
    for mine, untouched in zip(of.regions, before.regions, strict=True):
        assert torch.equal(mine, untouched)


@given(configs, st.sampled_from(LayoutKind), st.sampled_from(LayoutKind), block_lists)
def test_from_layout_to_layout_a_block_stays_the_same(config, kind, other_kind, blocks):
    source, target = laid_out(config, kind), laid_out(config, other_kind, 1)
    there = rows_of(source, len(blocks))
    there.gather(blocks)
    targets = [NUM_BLOCKS - 1 - block for block in blocks]
    Rows(target, there.tensor).scatter(targets)
    for block, copied in zip(blocks, targets, strict=True):
        assert torch.equal(block_bytes(source, block), block_bytes(target, copied))


CONFIG = LayoutConfig(num_blocks=8, num_layers=3, outer_dim=2, page_size=4, inner_dim=16)


def test_layers_of_one_allocation_begin_aligned():
    of = physical("1").configured(CONFIG).laid_out(LayoutKind.BLOCK_FIRST).allocated_on_host()
    starts = [region.data_ptr() for region in of.regions]
    assert [start - starts[0] for start in starts] == [0, 2048, 4096]
    of.close()
    assert of.regions == ()


def test_layout_over_existing_memory_checks_kind_and_size():
    sizes = required_allocations(CONFIG, LayoutKind.BLOCK_SECOND)
    unfinished = physical("1").configured(CONFIG).laid_out(LayoutKind.BLOCK_SECOND)
    storages = [host_memory(size) for size in sizes]
    of = unfinished.over_memory(storages)
    assert (of.agent, of.kind, len(of.regions)) == ("1", StorageKind.SYSTEM, 3)
    assert of.is_same_memory(unfinished.over_memory(storages))
    assert not of.is_same_memory(unfinished.allocated_on_host())
    with pytest.raises(RegionError, match=r"regions: 2 \(allowed: 3\)"):
        unfinished.over_memory(storages[:2])
    mixed = [*storages[:2], MemoryStorage(storages[2].tensor, StorageKind.PINNED)]
    with pytest.raises(RegionError, match="pinned and system"):
        unfinished.over_memory(mixed)
    with pytest.raises(RegionError, match="at least 2048"):
        unfinished.over_memory([*storages[:2], host_memory(2047)])
