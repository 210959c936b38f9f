"""Where bytes lie: against vectors, against numpy's own strides, and in overlap with nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.errors import BlockIndexError, LayoutError, RegionError
from worker_agent.layout.layout import Layout, MemoryRegion
from worker_agent.layout.strides import LayoutKind, required_allocations, strides

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "layouts.json").read_text())
FIELDS = {
    "num_blocks": 8,
    "num_layers": 3,
    "outer_dim": 2,
    "page_size": 4,
    "inner_dim": 16,
    "dtype_width_bytes": 2,
}
KINDS = {
    "block_is_first_dim": LayoutKind.BLOCK_FIRST,
    "block_is_second_dim": LayoutKind.BLOCK_SECOND,
    False: LayoutKind.BLOCK_FIRST,
    True: LayoutKind.BLOCK_SECOND,
}

configs = st.builds(
    LayoutConfig,
    num_blocks=st.integers(1, 6),
    num_layers=st.integers(1, 4),
    outer_dim=st.integers(1, 2),
    page_size=st.sampled_from([1, 2, 4]),
    inner_dim=st.integers(1, 5),
    dtype_width_bytes=st.sampled_from([1, 2, 4, 8]),
    alignment=st.sampled_from([1, 2, 64, 256]),
)


def kind_of(case):
    if case["kind"] == "fully_contiguous":
        return LayoutKind.CONTIGUOUS
    return KINDS[case.get("block_dim", case.get("outer_contiguous"))]


def laid_out(config, kind, first_address=0):
    regions, address = [], first_address
    for size_bytes in required_allocations(config, kind):
        regions.append(MemoryRegion(address, size_bytes))
        address += size_bytes
    return Layout(config, kind, regions)


@pytest.mark.parametrize("case", VECTORS["cases"], ids=str)
def test_strides_are_those_of_the_field(case):
    config = LayoutConfig(**VECTORS["config"], alignment=case["alignment"])
    kind, expected = kind_of(case), case["region"]
    of = strides(config, kind)
    assert (of.block_bytes, of.outer_bytes) == (case["block_stride"], case["outer_stride"])
    assert of.layer_bytes == case.get("layer_stride", 0)
    assert of.data_bytes == case.get("data_bytes", case.get("data_bytes_per_layer", of.data_bytes))
    if "required_allocations" in case:
        assert required_allocations(config, kind) == case["required_allocations"]
    size_bytes = of.data_bytes
    bases = [MemoryRegion(each * 2**20, size_bytes) for each in range(config.num_layers)]
    layout = Layout(config, kind, bases if kind.is_layer_separate else bases[:1])
    region = layout.memory_region(expected["block"], expected["layer"], expected["outer"])
    base = expected["layer"] * 2**20 if kind.is_layer_separate else 0
    offset = expected.get("offset", expected.get("offset_in_layer"))
    assert region == MemoryRegion(base + offset, expected["size"])


@given(configs, st.sampled_from(LayoutKind), st.integers(0, 300))
def test_nothing_overlaps_and_all_is_within(config, kind, first_address):
    layout = laid_out(config, kind, first_address)
    owner: dict[int, tuple[int, int, int]] = {}
    for place in np.ndindex(config.num_blocks, config.num_layers, config.outer_dim):
        region = layout.memory_region(*place)
        within = layout.regions[place[1] if kind.is_layer_separate else 0]
        assert within.address <= region.address <= region.end <= within.end
        for address in range(region.address, region.end):
            assert owner.setdefault(address, place) == place
    assert len(owner) == config.required_bytes


def test_blocks_begin_aligned():
    config = LayoutConfig(**FIELDS, alignment=512)
    for kind in LayoutKind:
        layout = laid_out(config, kind, 3)
        assert all(layout.memory_region(b, 0, 0).address % 512 == 0 for b in range(8))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_blocks", 0, "num_blocks_must_be_positive"),
        ("num_layers", 0, "num_layers_must_be_positive"),
        ("inner_dim", -1, "inner_dim_must_be_positive"),
        ("outer_dim", 3, "outer_dim_must_be_1_or_2"),
        ("page_size", 0, "page_size_must_be_positive_power_of_2"),
        ("page_size", 12, "page_size_must_be_positive_power_of_2"),
        (
            "dtype_width_bytes",
            3,
            "dtype_width_bytes_must_be_power_of_two_and_at_most_8_bytes",
        ),
        (
            "dtype_width_bytes",
            16,
            "dtype_width_bytes_must_be_power_of_two_and_at_most_8_bytes",
        ),
        ("alignment", 48, "alignment_must_be_power_of_2"),
        ("num_heads", 5, "inner_dim_must_be_divisible_by_num_heads"),
    ],
)
def test_invalid_layout_field_is_refused_by_name(field, value, rule):
    with pytest.raises(LayoutError, match=f"{field}: {value}") as refused:
        LayoutConfig(**{**FIELDS, field: value})
    assert refused.value.rule == rule
    assert refused.value.body()["field"] == field


def test_sizes_follow():
    config = LayoutConfig(**FIELDS, num_heads=4)
    assert (config.region_bytes, config.block_bytes, config.required_bytes) == (128, 768, 6144)
    assert config.head_dim == 4
    with pytest.raises(LayoutError, match="num_heads: None") as refused:
        LayoutConfig(**FIELDS).head_dim  # noqa: B018
    assert refused.value.rule == "num_heads_required_for_kv_block_layout"


@pytest.mark.parametrize("place", [(8, 0, 0), (0, 3, 0), (0, 0, 2), (-1, 0, 0)])
def test_block_out_of_range_is_refused(place):
    layout = laid_out(LayoutConfig(**FIELDS), LayoutKind.CONTIGUOUS)
    with pytest.raises(BlockIndexError, match="allowed: 0 to"):
        layout.memory_region(*place)


def test_memory_that_does_not_do_is_refused():
    config, layer = LayoutConfig(**FIELDS), MemoryRegion(0, 2048)
    with pytest.raises(RegionError, match=r"regions: 1 \(allowed: 3\)"):
        Layout(config, LayoutKind.BLOCK_FIRST, [layer])
    with pytest.raises(RegionError, match=r"regions\[0\]: 6143 bytes \(allowed: at least 6144\)"):
        Layout(config, LayoutKind.CONTIGUOUS, [MemoryRegion(0, 6143)])
    overlapping = [MemoryRegion(0, 2048), MemoryRegion(2047, 2048), MemoryRegion(9000, 2048)]
    with pytest.raises(RegionError, match="0x7ff is inside the region at 0x0"):
        Layout(config, LayoutKind.BLOCK_FIRST, overlapping)
    unaligned = LayoutConfig(**FIELDS, alignment=256)
    with pytest.raises(RegionError, match="at least 6399"):
        Layout(unaligned, LayoutKind.CONTIGUOUS, [MemoryRegion(1, 6144)])
