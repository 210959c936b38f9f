"""Blocks of a device's layouts to rows on the host and back, the same bytes on CPU and CUDA."""

import pytest
import torch

from support.blocks.recording_device import RecordingDevice
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.strides import LayoutKind
from worker_agent.transfer.device_copies import STAGING_BLOCKS, DeviceCopies
from worker_agent.transfer.errors import TransferError
from worker_agent.transfer.physical import physical
from worker_agent.transfer.rows import Rows

CONFIG = LayoutConfig(num_blocks=64, num_layers=3, outer_dim=2, page_size=4, inner_dim=16)
BLOCKS = list(range(60, 60 - 2 * (2 * STAGING_BLOCKS - 5), -2))
"""More than one staging takes, and not a multiple of it."""

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=[(device, kind) for device in DEVICES for kind in LayoutKind])
def layout(request):
    device, kind = request.param
    of = physical("1").configured(CONFIG).laid_out(kind).allocated_on_device(torch.device(device))
    generator = torch.Generator().manual_seed(1)
    for region in of.regions:
        region.copy_(torch.randint(0, 256, region.shape, dtype=torch.uint8, generator=generator))
    return of


def all_rows(layout):
    rows = Rows.of(layout, CONFIG.num_blocks)
    rows.gather(range(CONFIG.num_blocks))
    return rows.tensor.cpu()


def test_gathered_rows_are_the_blocks(layout):
    copies, expected = DeviceCopies([layout]), all_rows(layout)
    rows = copies.host_rows(len(BLOCKS) + 1).zero_()
    copies.gather(BLOCKS, rows).wait()
    assert torch.equal(rows[:-1], expected[BLOCKS])
    assert not rows[-1].any()
    assert rows.is_pinned() == (layout.device.type == "cuda")


def test_scattered_rows_become_the_blocks_and_no_other(layout):
    copies, expected = DeviceCopies([layout]), all_rows(layout)
    rows = copies.host_rows(len(BLOCKS))
    rows.copy_((torch.arange(rows.numel()).view(rows.shape) % 251).to(torch.uint8))
    copies.scatter(BLOCKS, rows).wait()
    expected[BLOCKS] = rows
    assert torch.equal(all_rows(layout), expected)
    copies.scatter([], rows).wait()
    copies.gather([], rows).wait()
    assert torch.equal(all_rows(layout), expected)


@pytest.mark.parametrize("saved", [(0, 1, 2), (1,), ()])
@pytest.mark.parametrize(
    "layout", [(d, kind) for d in DEVICES for kind in LayoutKind if kind.is_layer_separate],
    indirect=True,
)  # fmt: skip
def test_gather_by_layer_reads_the_blocks_numbers_once(layout, saved):
    """They are on the device from the beginning, not sent with each layer."""
    copies, expected, blocks = DeviceCopies([layout]), all_rows(layout), BLOCKS[:STAGING_BLOCKS]
    gather = copies.gather_by_layer(blocks)
    chosen = blocks.copy()
    blocks.clear()
    for layer in saved:
        gather.save(layer)
    copy = gather.end()
    copy.wait()
    assert torch.equal(copy.rows, expected[chosen])


def test_gather_between_layers_does_not_use_their_staging_rows():
    of = physical("1").configured(CONFIG).laid_out(LayoutKind.BLOCK_FIRST).allocated_on_host()
    for region in of.regions:
        region.copy_(torch.arange(region.numel()).view(region.shape) % 251)
    expected, device = all_rows(of), RecordingDevice()
    copies = DeviceCopies([of], device)
    with device.recording():
        layers = copies.gather_by_layer([1, 2, 3])
        layers.save(0)
        whole = copies.gather([7, 8, 9], copies.host_rows(3))
        by_layer = layers.end()
        for copy in (whole, by_layer):
            copy.wait()
    assert torch.equal(whole.rows, expected[[7, 8, 9]])
    assert torch.equal(by_layer.rows, expected[[1, 2, 3]])


def test_invalid_copy_is_refused(layout):
    copies = DeviceCopies([layout])
    rows = copies.host_rows(2)
    with pytest.raises(TransferError, match=r"blocks: 64 \(allowed: 0 to 63\)"):
        copies.gather([64], rows)
    with pytest.raises(TransferError, match="blocks: 3 twice"):
        copies.scatter([3, 3], rows)
    with pytest.raises(TransferError, match="allowed: 3 of 768 bytes"):
        copies.gather([1, 2, 3], rows)
    with pytest.raises(TransferError, match="of 768 bytes"):
        copies.scatter([1], rows[:, 1:])
