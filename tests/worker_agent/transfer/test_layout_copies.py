"""Blocks from layout to layout: planned, checked, copied in batches, with results one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.strides import LayoutKind
from worker_agent.storage.base import StorageKind
from worker_agent.storage.errors import StorageError
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.layout_copies import BATCH_BLOCKS, LayoutCopies
from worker_agent.transfer.physical import physical
from worker_agent.transfer.plan import BlockResult
from worker_agent.transfer.rows import Rows

NUM_BLOCKS = 2 * BATCH_BLOCKS + 3
CONFIG = LayoutConfig(num_blocks=NUM_BLOCKS, num_layers=2, outer_dim=2, page_size=4, inner_dim=8)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
kinds, devices = st.sampled_from(LayoutKind), st.sampled_from(DEVICES)


def laid_out(kind, device="cpu", seed=0, config=CONFIG):
    of = physical("1").configured(config).laid_out(kind).allocated_on_device(torch.device(device))
    generator = torch.Generator().manual_seed(seed)
    for region in of.regions:
        region.copy_(torch.randint(0, 256, region.shape, dtype=torch.uint8, generator=generator))
    return of


def blocks_of(layout):
    rows = Rows.of(layout, NUM_BLOCKS)
    rows.gather(range(NUM_BLOCKS))
    return rows.tensor.cpu()


@settings(max_examples=30)
@given(
    kind=kinds,
    other_kind=kinds,
    device=devices,
    other_device=devices,
    targets=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1),
    data=st.data(),
)
def test_targets_become_their_sources_and_no_other_block_changes(
    kind, other_kind, device, other_device, targets, data
):
    source, target = laid_out(kind, device), laid_out(other_kind, other_device, seed=1)
    numbers = st.integers(0, NUM_BLOCKS - 1)
    sources = data.draw(st.lists(numbers, min_size=len(targets), max_size=len(targets)))
    expected = blocks_of(target)
    expected[targets] = blocks_of(source)[sources]
    outcomes = LayoutCopies(source, target).copy(sources, targets)
    assert outcomes == [BlockResult.DONE] * len(targets)
    assert torch.equal(blocks_of(target), expected)


@pytest.mark.parametrize("kind", LayoutKind)
def test_invalid_copy_moves_no_byte(kind):
    layout = laid_out(kind)
    before = blocks_of(layout)
    copies = LayoutCopies(layout, layout)
    for sources, targets, rule in (
        ([], [], "no_blocks_provided"),
        ([0, 1], [2], "count_mismatch"),
        ([0, NUM_BLOCKS], [2, 3], "block_out_of_range"),
        ([0, 1], [2, 2], "duplicate_destination_blocks"),
        ([0, 1], [2, 0], "overlapping"),
    ):
        with pytest.raises(TransferError) as refused:
            copies.copy(sources, targets)
        assert refused.value.rule == rule
    assert torch.equal(blocks_of(layout), before)
    assert copies.copy([0, 1], [2, 3]) == [BlockResult.DONE] * 2


def test_blocks_are_of_one_size():
    other = LayoutConfig(num_blocks=1, num_layers=1, outer_dim=2, page_size=4, inner_dim=8)
    with pytest.raises(TransferError, match=r"target: blocks of 128 bytes \(allowed: 256, as"):
        LayoutCopies(
            laid_out(LayoutKind.CONTIGUOUS), laid_out(LayoutKind.BLOCK_FIRST, config=other)
        )


def test_blocks_in_a_file_are_there_after_it_is_closed(tmp_path):
    source = laid_out(LayoutKind.BLOCK_SECOND)
    of = physical("1").configured(CONFIG).laid_out(LayoutKind.CONTIGUOUS)
    on_disk = of.allocated_on_disk(tmp_path / "blocks")
    assert on_disk.kind is StorageKind.DISK
    assert LayoutCopies(source, on_disk).copy([1, 2], [2, 0]) == [BlockResult.DONE] * 2
    kept = blocks_of(on_disk)
    on_disk.close()
    again = of.allocated_on_disk(tmp_path / "blocks")
    assert torch.equal(blocks_of(again), kept)
    assert torch.equal(kept[[2, 0]], blocks_of(source)[[1, 2]])


def test_file_of_another_process_is_refused(tmp_path):
    of = physical("1").configured(CONFIG).laid_out(LayoutKind.CONTIGUOUS)
    of.allocated_on_disk(tmp_path / "blocks")
    with pytest.raises(StorageError, match=r"path: .*blocks"):
        of.allocated_on_disk(tmp_path / "blocks")
