"""Registered layouts: named while their memory is there, in every order of coming and going."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import InvalidFieldError
from router.protocol.values import Tier
from support.chaos.fuzzing import examples
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.descriptor import decode_descriptor, encode_descriptor
from worker_agent.layout.errors import LayoutError, RegionError
from worker_agent.layout.layout import Layout, MemoryRegion
from worker_agent.layout.strides import LayoutKind
from worker_agent.storage.base import StorageKind
from worker_agent.storage.disk import DiskStorage
from worker_agent.storage.errors import RegistrationError
from worker_agent.storage.memory import MemoryStorage, host_memory
from worker_agent.storage.registered import LayoutHandle, RegisteredLayouts

CONFIG = LayoutConfig(num_blocks=4, num_layers=3, outer_dim=2, page_size=4, inner_dim=16)
LAYER_BYTES = 4 * 2 * CONFIG.region_bytes


def by_layer():
    storages = [host_memory(LAYER_BYTES) for _ in range(3)]
    layout = Layout(CONFIG, LayoutKind.BLOCK_FIRST, [each.region for each in storages])
    return layout, storages


def in_one_piece(storage):
    return Layout(CONFIG, LayoutKind.CONTIGUOUS, [storage.region])


def test_a_layout_has_a_name_until_it_is_released():
    layouts, (layout, storages) = RegisteredLayouts(1337), by_layer()
    handle = layouts.register(Tier.DEVICE, layout, storages)
    assert (handle, str(handle)) == (LayoutHandle(1337, 0), "1337/0")
    assert layouts.get(handle).layout is layout
    layouts.release(handle)
    assert all("1337" not in storage.registrations for storage in storages)
    with pytest.raises(RegistrationError, match=r"1337/0: not registered \(allowed: none\)"):
        layouts.release(handle)
    assert layouts.register(Tier.DEVICE, layout, storages) == LayoutHandle(1337, 1)


def test_the_same_memory_twice_is_refused_and_leaves_nothing():
    layouts, (layout, storages) = RegisteredLayouts(1), by_layer()
    other = host_memory(CONFIG.required_bytes)
    layouts.register(Tier.HOST, layout, storages)
    with pytest.raises(RegistrationError, match="1: registered already"):
        layouts.register(Tier.HOST, in_one_piece(other), [other, storages[1]])
    assert (len(other.registrations), len(layouts)) == (0, 1)
    layouts.check_invariants()


def test_memory_that_goes_takes_its_layout_with_it():
    layouts, (layout, storages) = RegisteredLayouts(1), by_layer()
    handle = layouts.register(Tier.HOST, layout, storages)
    storages[1].close()
    assert [len(storage.registrations) for storage in storages] == [0, 0, 0]
    with pytest.raises(RegistrationError, match="not registered"):
        layouts.get(handle)


def test_a_region_outside_the_memory_is_refused():
    layouts, storage = RegisteredLayouts(1), host_memory(CONFIG.required_bytes)
    beyond = MemoryRegion(storage.region.address + 1, storage.region.size_bytes)
    layout = Layout(CONFIG, LayoutKind.CONTIGUOUS, [beyond])
    with pytest.raises(RegionError, match=r"regions\[0\]: 0x") as caught:
        layouts.register(Tier.HOST, layout, [storage])
    assert (caught.value.rule, len(storage.registrations)) == ("region_not_registered", 0)


@pytest.mark.parametrize("worker_id", [-1, 1 << 64])
def test_a_worker_id_has_64_bits(worker_id):
    with pytest.raises(InvalidFieldError, match=r"allowed: 0 to 2\^64 - 1"):
        RegisteredLayouts(worker_id)


def test_descriptor_gives_peers_the_memory_layout(tmp_path):
    layouts, memory = RegisteredLayouts((1 << 64) - 1), host_memory(CONFIG.required_bytes)
    device = MemoryStorage(host_memory(CONFIG.required_bytes).tensor, StorageKind.DEVICE)
    pinned = MemoryStorage(host_memory(CONFIG.required_bytes).tensor, StorageKind.PINNED)
    disk = DiskStorage(tmp_path / "blocks", 4, CONFIG.block_bytes)
    on_disk = msgspec.structs.replace(CONFIG, alignment=4096)
    file_layout = Layout(on_disk, LayoutKind.CONTIGUOUS, [disk.region])
    reported = []
    for storage, layout in [(s, in_one_piece(s)) for s in (memory, device, pinned)] + [
        (disk, file_layout)
    ]:
        handle = layouts.register(Tier.HOST, layout, [storage])
        descriptor = layouts.descriptor(handle, "UniversalTP")
        assert decode_descriptor(encode_descriptor(descriptor)) == descriptor
        assert descriptor.layout().memory_region(3, 2, 1) == layout.memory_region(3, 2, 1)
        assert descriptor.nixl_metadata.agent_name == f"{(1 << 64) - 1}"
        reported.append((descriptor.location, descriptor.nixl_metadata.mem_type))
    assert reported == [
        ("System", "DRAM"),
        ({"Device": 0}, "VRAM"),
        ("Pinned", "DRAM"),
        ({"Disk": 0}, "FILE"),
    ]
    layouts.close()
    disk.close()
    separate = layouts.register(Tier.HOST, *by_layer())
    with pytest.raises(LayoutError, match="an operational order"):
        layouts.descriptor(separate, "UniversalTP")


@given(st.lists(st.tuples(st.sampled_from("rcd"), st.integers(0, 2)), max_size=20))
@settings(max_examples=examples(50))
def test_memory_and_names_agree_under_random_operations(operations):
    layouts, stacks = RegisteredLayouts(7), [by_layer() for _ in range(3)]
    handles, closed = {}, set()
    for operation, index in operations:
        layout, storages = stacks[index]
        if operation == "r" and index not in closed and index not in handles:
            handles[index] = layouts.register(Tier.DEVICE, layout, storages)
        elif operation == "c":
            storages[0].close()
            closed.add(index)
            handles.pop(index, None)
        elif operation == "d" and index in handles:
            layouts.release(handles.pop(index))
        assert len(layouts) == len(handles)
        assert [len(s.registrations) for _, group in stacks for s in group[1:]] == [
            int(index in handles) for index in range(3) for _ in range(2)
        ]
        layouts.check_invariants()
