"""A block manager: built whole or not at all, used from anywhere, ended whole."""

import gc
import threading
import time
import weakref

import msgspec
import pytest
import torch

from router.errors import InvalidFieldError
from router.protocol.values import Tier
from support.processes.servers import eventually
from worker_agent.blocks.errors import NotEnoughBlocksError, PoolClosedError
from worker_agent.blocks.names import BlockName, CacheLevel, level_of
from worker_agent.blocks.pool_values import Duplicates, PoolStatus
from worker_agent.layout.errors import LayoutError
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.config import (
    BlockManagerConfig,
    CacheModel,
    InFile,
    Offload,
    OnDevice,
    OnHost,
    Ready,
    RemoteStore,
    RuntimeConfig,
    Shared,
    TierLayout,
)
from worker_agent.manager.manager import CancelToken, KvBlockManager
from worker_agent.offload.queue import Waiting
from worker_agent.storage.disk import DiskStorage
from worker_agent.storage.errors import StorageError
from worker_agent.storage.memory import host_memory
from worker_agent.storage.registered import LayoutHandle

G1, G2, G3, G4 = CacheLevel
MODEL = CacheModel(num_layers=3, page_size=4, inner_dim=16)
RUNTIME = RuntimeConfig(worker_id=1337)
DEVICE = TierLayout(num_blocks=8, place=OnDevice())
HOST = TierLayout(num_blocks=16, place=OnHost())


def config(**parts):
    return BlockManagerConfig(**({"runtime": RUNTIME, "model": MODEL} | parts))


def all_tiers(folder):
    shared = TierLayout(num_blocks=16, place=Shared(folder / "host"))
    disk = TierLayout(num_blocks=32, place=InFile(folder / "disk"))
    return config(device=DEVICE, host=shared, disk=disk)


def test_every_tier_has_blocks_of_its_own(tmp_path):
    with KvBlockManager(all_tiers(tmp_path)) as manager:
        assert manager.worker_id() == 1337
        sets = manager.block_sets()
        assert [(each.index, each.level) for each in sets.values()] == [(0, G1), (1, G2), (2, G3)]
        assert [each.handle for each in sets.values()] == [LayoutHandle(1337, i) for i in range(3)]
        tiers = [manager.device(), manager.host(), manager.disk()]
        assert [tier.status.empty_blocks for tier in tiers] == [8, 16, 32]
        addresses = [each.memory.layout.memory_region(1, 0, 0).address for each in sets.values()]
        starts = [each.memory.layout.regions[0].address for each in sets.values()]
        strides = [here - start for here, start in zip(addresses, starts, strict=True)]
        assert strides == [768, 768, 4096]  # a block in a file begins at a page
        assert len(manager.layouts()) == 3


def test_tiers_that_are_not_wanted_are_not_there():
    with KvBlockManager(config(host=HOST)) as manager:
        assert (manager.device(), manager.disk()) == (None, None)
        assert manager.host().status == PoolStatus(0, 0, 16)
        assert manager.block_sets()[G2].index == 0
    unnamed = msgspec.structs.replace(RUNTIME, registers_layouts=False)
    with KvBlockManager(config(runtime=unnamed, host=HOST)) as manager:
        assert len(manager.layouts()) == 0
        assert manager.block_sets()[G2].handle is None


def test_levels_are_the_bus_s_tiers():
    assert [level.tier for level in CacheLevel] == list(Tier)
    assert [level_of(tier) for tier in Tier] == list(CacheLevel)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, r"device: no tier at all \(allowed: one of device, host, disk\)"),
        ({"host": {"num_blocks": 0}}, r"G2.num_blocks: 0 \(allowed: at least 1\)"),
        ({"host": {"place": OnDevice()}}, r"G2.place: OnDevice \(allowed: OnHost, Shared, Ready\)"),
        ({"host": {"kind": LayoutKind.BLOCK_FIRST}}, "G2.kind: block_first .allowed: contiguous"),
        ({"host": {"alignment": 64}}, r"G2.alignment: 64 \(allowed: 1\)"),
        ({"host": {"eviction": "fifo"}}, "G2.eviction: 'fifo' .allowed: lru, priority, multi_lru"),
        ({"host": {"place": Ready(())}}, "G2.place: nothing .allowed: one memory of the host"),
    ],
)
def test_invalid_tier_is_refused(parts, said):
    with pytest.raises(InvalidFieldError, match=said):
        config(**{key: msgspec.structs.replace(HOST, **each) for key, each in parts.items()})


def test_invalid_block_is_refused():
    with pytest.raises(InvalidFieldError, match=r"worker_id: -1 \(allowed: 0 to 2\^64 - 1\)"):
        RuntimeConfig(worker_id=-1)
    with pytest.raises(InvalidFieldError, match=r"dtype: 'int3' .allowed: uint8, float8_e4m3fn"):
        CacheModel(num_layers=3, page_size=4, inner_dim=16, dtype="int3")
    with pytest.raises(LayoutError, match="num_layers: 0") as caught:
        CacheModel(num_layers=0, page_size=4, inner_dim=16)
    assert caught.value.rule == "num_layers_must_be_positive"
    with pytest.raises(LayoutError, match=r"alignment: 3 .allowed: a power of two"):
        config(device=msgspec.structs.replace(DEVICE, alignment=3))
    with pytest.raises(InvalidFieldError, match=r"G1.place.device: 'abacus' .allowed: cpu"):
        KvBlockManager(config(device=TierLayout(num_blocks=1, place=OnDevice("abacus"))))


def test_a_tier_that_cannot_be_had_leaves_nothing_behind(tmp_path):
    nowhere = TierLayout(num_blocks=4, place=InFile(tmp_path / "nowhere" / "disk"))
    with pytest.raises(StorageError, match="No such file"):
        KvBlockManager(msgspec.structs.replace(all_tiers(tmp_path), disk=nowhere))
    KvBlockManager(all_tiers(tmp_path)).close()  # the shared memory was let go


def test_memory_that_is_there_is_taken_over(tmp_path):
    layers = Ready(tuple(host_memory(8 * 256) for _ in range(3)))
    host = Ready((host_memory(MODEL.layout(16, 1).required_bytes),))
    disk = Ready((DiskStorage(tmp_path / "disk", 4, 768),))
    device = TierLayout(num_blocks=8, place=layers, kind=LayoutKind.BLOCK_FIRST)
    parts = {
        "device": device,
        "host": msgspec.structs.replace(HOST, place=host),
        "disk": TierLayout(num_blocks=4, place=disk),
    }
    with KvBlockManager(config(**parts)) as manager:
        region = manager.block_sets()[G1].memory.layout.memory_region(0, 2, 0)
        assert region.address == layers.storages[2].region.address
    with pytest.raises(StorageError, match="closed"):
        _ = host.storages[0].region
    with pytest.raises(StorageError, match="closed"):
        _ = disk.storages[0].region


def test_a_closed_one_hands_nothing_out_and_takes_everything_back():
    manager = KvBlockManager(config(device=DEVICE))
    device = manager.device()
    held = device.allocate(2)
    manager.close()
    manager.close()
    for call in (manager.device, manager.block_sets, manager.layouts, lambda: device.allocate(1)):
        with pytest.raises(PoolClosedError):
            call()
    held.release()
    assert manager.status() == {G1: PoolStatus(0, 0, 8)}


def test_manager_ends_with_its_process_only():
    process = CancelToken()
    one, other = (KvBlockManager(config(host=HOST), process) for _ in range(2))
    one.close()
    assert not process.is_cancelled
    host = other.host()
    process.cancel()
    with pytest.raises(PoolClosedError):
        host.allocate(1)
    other.close()


async def test_a_forgotten_one_gives_its_memory_back(tmp_path):
    manager = KvBlockManager(all_tiers(tmp_path))
    host = weakref.ref(manager.host())
    del manager
    gc.collect()
    await eventually(lambda: host() is None)
    KvBlockManager(all_tiers(tmp_path)).close()


async def test_an_event_loop_is_not_kept_waiting(tmp_path):
    async with await KvBlockManager.opened(all_tiers(tmp_path)) as manager:
        with manager.host().allocate(3) as blocks:
            assert len(blocks) == 3
    with pytest.raises(PoolClosedError):
        manager.host()


def test_many_threads_share_a_pool():
    with KvBlockManager(config(host=HOST)) as manager:
        host = manager.host()

        def work(number):
            for turn in range(200):
                identity = (number * 7 + turn) % 20
                name = BlockName(identity.to_bytes(16, "little"), identity)
                try:
                    with host.allocate(2) as two, host.match([name.identity]):
                        two.register([name, BlockName(bytes(15) + b"\xff", 0)]).release()
                except NotEnoughBlocksError:
                    continue

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        host.pool.check_invariants()
        assert host.status.active_blocks == 0


def test_duplicates_and_eviction_are_the_tier_s():
    kept = msgspec.structs.replace(HOST, duplicates=Duplicates.KEPT, eviction="priority")
    with KvBlockManager(config(host=kept)) as manager:
        name = BlockName(bytes(16), 0)
        first, second = (manager.host().allocate(1).register([name]) for _ in range(2))
        assert first.block_ids != second.block_ids
        first.release()
        second.release()


def fives():
    return torch.full((1, MODEL.layout(1, 1).block_bytes), 5, dtype=torch.uint8)


def held(manager, name, wanted):
    """Whether the tiers of this mask come to hold this, and no others."""
    manager.stack.poll(time.monotonic())
    return manager.stack.held(name.identity) == wanted


async def test_kept_blocks_are_found_by_a_later_life(tmp_path):
    name = BlockName(b"n" * 16, 7)
    async with await KvBlockManager.opened(all_tiers(tmp_path)) as manager:
        manager.stack.store([Waiting(name, 0, 0)], fives())
        await eventually(lambda: held(manager, name, 1 << Tier.HOST | 1 << Tier.DISK))
    other = msgspec.structs.replace(MODEL, name="another")
    async with await KvBlockManager.opened(all_tiers(tmp_path)) as manager:
        await eventually(lambda: held(manager, name, 1 << Tier.HOST | 1 << Tier.DISK))
        loading = manager.stack.load([name.identity], time.monotonic(), 60.0)
        await eventually(lambda: manager.stack.poll(time.monotonic()) or loading.is_done)
        assert (loading.usable_blocks, set(loading.rows[0].tolist())) == (1, {5})
    async with await KvBlockManager.opened(
        msgspec.structs.replace(all_tiers(tmp_path), model=other)
    ) as manager:
        assert manager.block_sets()[G3].memory.journal.written() == []


async def test_a_store_that_workers_share(tmp_path, redis_port):
    name = BlockName(b"n" * 16, 7)
    store = RemoteStore(url=f"redis://127.0.0.1:{redis_port}", max_blocks=8, namespace="shared")
    async with await KvBlockManager.opened(config(host=HOST, remote=store)) as manager:
        manager.stack.store([Waiting(name, 0, 0)], fives())
        await eventually(lambda: held(manager, name, 1 << Tier.HOST | 1 << Tier.REMOTE))
    other = config(runtime=RuntimeConfig(worker_id=9), device=DEVICE, remote=store)
    async with await KvBlockManager.opened(other) as manager:
        loading = manager.stack.load([name.identity], time.monotonic(), 60.0)
        await eventually(lambda: manager.stack.poll(time.monotonic()) or loading.is_done)
        assert (loading.usable_blocks, set(loading.rows[0].tolist())) == (1, {5})


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("url", "http://h", "G4.url: 'http://h' .allowed: redis://"), ("ttl_s", 0, "G4.ttl_s: 0 .")],
)
def test_invalid_store_is_refused(field, value, said):
    with pytest.raises(InvalidFieldError, match=said):
        RemoteStore(**({"url": "redis://h", "max_blocks": 1} | {field: value}))


async def test_file_that_is_not_kept_is_unlinked(tmp_path):
    place = InFile(tmp_path / "disk", is_kept=False)
    async with await KvBlockManager.opened(config(disk=TierLayout(num_blocks=4, place=place))):
        assert list(tmp_path.iterdir()) == []


def test_a_pace_of_nothing_is_refused():
    with pytest.raises(InvalidFieldError, match=r"store_bytes_per_s: 0 \(allowed: above 0\)"):
        Offload(store_bytes_per_s=0)


def test_cancelling_reaches_everything_below():
    above = CancelToken()
    child, called = above.child().child(), []
    child.when_cancelled(lambda: called.append("before"))
    above.cancel()
    above.cancel()
    child.when_cancelled(lambda: called.append("after"))
    assert called == ["before", "after"]
    assert child.is_cancelled
    assert above.child().is_cancelled
