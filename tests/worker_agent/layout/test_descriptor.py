"""Layouts as JSON: there and back, and what is refused of a peer's."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

CONFIG = LayoutConfig(num_blocks=8, num_layers=3, outer_dim=2, page_size=4, inner_dim=16)
METADATA = AgentMetadata("1337", "Dram", 0)


def layout(kind, first_address=2**63):
    sizes = required_allocations(CONFIG, kind)
    regions = [MemoryRegion(first_address + 2**20 * i, size) for i, size in enumerate(sizes)]
    return Layout(CONFIG, kind, regions)


def as_json(kind=LayoutKind.CONTIGUOUS):
    return json.loads(encode_descriptor(described(layout(kind), "System", METADATA)))


def decode(fields):
    return decode_descriptor(json.dumps(fields).encode())


@given(
    st.sampled_from(LayoutKind), st.integers(0, 2**63), st.sampled_from([{"Device": 1}, "Pinned"])
)
def test_there_and_back_every_address_is_the_same(kind, first_address, location):
    ours = layout(kind, first_address)
    descriptor = described(ours, location, METADATA, "OperationalNHD")
    theirs = decode_descriptor(encode_descriptor(descriptor))
    assert theirs == descriptor
    assert theirs.layout().memory_region(3, 2, 1) == ours.memory_region(3, 2, 1)
    assert theirs.layout().kind is kind


def test_descriptor_fields_are_as_documented():
    assert as_json() == {
        "version": 1,
        "layout_config": {
            "num_blocks": 8,
            "num_layers": 3,
            "outer_dim": 2,
            "page_size": 4,
            "inner_dim": 16,
            "dtype_width_bytes": 2,
            "alignment": 1,
            "num_heads": None,
        },
        "location": "System",
        "nixl_metadata": {"agent_name": "1337", "mem_type": "Dram", "device_id": 0},
        "memory_descriptors": [{"addr": 2**63, "size": 6144}],
        "layout_type_details": {
            "FullyContiguous": {"kv_block_layout": "Unknown", "block_format": "Operational"}
        },
    }
    assert as_json(LayoutKind.BLOCK_SECOND)["layout_type_details"] == {
        "LayerSeparate": {"block_dim": "BlockIsSecondDim", "kv_block_layout": "Unknown"}
    }


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"version": 2}, LayoutError, r"version: 2 \(allowed: at most 1\)"),
        ({"location": "Moon"}, LayoutError, "Moon"),
        ({"memory_descriptors": []}, RegionError, r"regions: 0 \(allowed: 1\)"),
        ({"memory_descriptors": [{"addr": 0, "size": 6143}]}, RegionError, "at least 6144"),
        ({"memory_descriptors": [{"addr": 2**64, "size": 1}]}, RegionError, "64-bit addresses"),
        ({"layout_type_details": {}}, LayoutError, "both or none"),
        ({"layout_config": {}}, LayoutError, "num_blocks"),
    ],
)
def test_invalid_peer_descriptor_is_refused(change, error, said):
    with pytest.raises(error, match=said):
        decode({**as_json(), **change})


def test_a_configuration_that_does_not_fit_is_refused():
    fields = as_json()
    fields["layout_config"]["page_size"] = 3
    with pytest.raises(LayoutError, match="page_size: 3"):
        decode(fields)
    for data in (b"", b"{", b"\xff", b"[]"):
        with pytest.raises(LayoutError, match="JSON of version 1"):
            decode_descriptor(data)


def test_memory_by_layer_has_an_operational_order():
    with pytest.raises(LayoutError, match="an operational order"):
        described(layout(LayoutKind.BLOCK_FIRST), "System", METADATA, "UniversalTP")
