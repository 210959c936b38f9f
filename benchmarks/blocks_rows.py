"""Rows of how fast blocks move."""

import gc
import random
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time_ns

import blocks_cuda
import torch
from blocks_disk import DiskWorld
from blocks_remote import RemoteWorld
from report import Benchmark, Section, report
from rows import Row
from timing import Bounded, alternate

from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.strides import LayoutKind
from worker_agent.manager.config import EVICTIONS, eviction_of
from worker_agent.storage.memory import host_memory
from worker_agent.transfer.layout_copies import LayoutCopies
from worker_agent.transfer.physical import PhysicalLayout, physical
from worker_agent.transfer.rows import Rows
from worker_agent.transfer.slots import MemorySlots

MIB = 2**20
ROUNDS = 7
POOL_BLOCKS_PER_S = 500.0
POOL_RUN_BLOCKS = 256
GATHERED_BLOCKS = 256


class Size:
    """How much is moved."""

    def __init__(self, quick: bool) -> None:
        self.pool_blocks = 100_000 if quick else 1_000_000
        self.copied_bytes = (64 if quick else 256) * MIB
        self.disk_blocks = 64 if quick else 512
        self.remote_blocks = 32 if quick else 128


def pool_rows(size: Size) -> list[Row]:
    identities = [_identity(number) for number in range(size.pool_blocks)]
    names = list(map(_name, identities, [None, *identities]))
    rows = []
    for policy in EVICTIONS:
        sides = [lambda _, policy=policy: _pool_time(policy, identities, names)]
        [times] = alternate(sides, 3)
        rate = size.pool_blocks / median(times) * 1e6
        rows.append(Bounded(policy, rate, POOL_BLOCKS_PER_S, "k/s", POOL_BLOCKS_PER_S, lower=False))
    return rows


def copy_rows(size: Size) -> list[Row]:
    """Contiguous blocks of a device that is the CPU, and the slots of a tier of the host."""
    rows = []
    for block_bytes in (MIB // 2, MIB, 2 * MIB):
        count = size.copied_bytes // block_bytes
        order = random.Random(1).sample(range(count), count)
        device, host = (_contiguous(count, block_bytes) for _ in range(2))
        staging = torch.ones((count, block_bytes), dtype=torch.uint8)
        slots = MemorySlots(host_memory(size.copied_bytes), count)
        calls = {
            "to the host": partial(LayoutCopies(device, host).copy, order, range(count)),
            "from the host": partial(LayoutCopies(host, device).copy, range(count), order),
            "into a tier": partial(slots.write, order, list(staging)),
            "out of a tier": partial(slots.read, order, list(staging)),
        }
        for name, call in calls.items():
            label = f"{name}, {block_bytes / MIB:g} MiB"
            rows.append(_against_memcpy(label, 0.85, call, staging))
    return rows


def _contiguous(count: int, block_bytes: int) -> PhysicalLayout:
    config = LayoutConfig(
        num_blocks=count,
        num_layers=1,
        outer_dim=2,
        page_size=16,
        inner_dim=block_bytes // (2 * 16 * 2),
    )
    of = physical("1").configured(config).laid_out(LayoutKind.CONTIGUOUS).allocated_on_host()
    of.regions[0].fill_(1)  # memory that is there
    return of


def gather_rows(size: Size) -> list[Row]:
    del size
    config = LayoutConfig(
        num_blocks=2 * GATHERED_BLOCKS,
        num_layers=32,
        outer_dim=2,
        page_size=16,
        inner_dim=MIB // (32 * 2 * 16 * 2),
    )
    blocks = random.Random(1).sample(range(config.num_blocks), GATHERED_BLOCKS)
    rows = []
    for kind in LayoutKind:
        layout = physical("1").configured(config).laid_out(kind).allocated_on_host()
        staging = torch.ones((GATHERED_BLOCKS, config.block_bytes), dtype=torch.uint8)
        of = Rows(layout, staging)
        for name, call, goal in (("gather", of.gather, 0.6), ("scatter", of.scatter, 0.4)):
            rows.append(_against_memcpy(f"{name} {kind}", goal, partial(call, blocks), staging))
    return rows


def disk_rows(size: Size) -> list[Row]:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        world = DiskWorld(Path(directory), size.disk_blocks)
        read = _in_turn(_timed(world.read), _timed(world.read_plainly))
        checked = _in_turn(_timed(world.load), _timed(world.read))
        world.close()
    return [
        _paired("read", 0.8, *read, world.size_bytes),
        _paired("read and check", 0.95, *checked, world.size_bytes),
    ]


def remote_rows(size: Size) -> list[Row]:
    with RemoteWorld(size.remote_blocks) as world:
        put, put_plainly, put_unsealed = (
            world.emptied(_timed(side))
            for side in (world.put, world.put_plainly, world.put_unsealed)
        )
        stored, stored_sealed = _in_turn(put, put_plainly), _in_turn(put, put_unsealed)
        world.fill()
        get, get_unsealed = _timed(world.get), _timed(world.get_unsealed)
        loaded, loaded_sealed = (
            _in_turn(get, _timed(world.get_plainly)),
            _in_turn(get, get_unsealed),
        )
    return [
        _paired("put", 0.7, *stored, world.size_bytes),
        _paired("get", 0.7, *loaded, world.size_bytes),
        _paired("put with seals, beside checksums", 0.9, *stored_sealed, world.size_bytes),
        _paired("get with seals, beside checksums", 0.9, *loaded_sealed, world.size_bytes),
    ]


def cuda_rows(size: Size) -> list[Row]:
    del size
    return blocks_cuda.cuda_rows()


SECTIONS: dict[str, tuple[str, Callable[[Size], list[Row]]]] = {
    "pool": ("allocate, register, match and release, thousand blocks a second", pool_rows),
    "copy": ("blocks between two memories of the host, beside one copy of all", copy_rows),
    "gather": ("256 blocks out of a layout and into it, beside one copy of all", gather_rows),
    "disk": ("blocks of 1 MiB from a file, beside a plain reader; then their checksums", disk_rows),
    "cuda": ("512 blocks of 2 MiB to and from a GPU, beside one copy of all", cuda_rows),
    "remote": ("blocks of 256 KiB to and from a Redis, beside a plain pipeline", remote_rows),
}


def measured(arguments: Namespace) -> int:
    """Measure sections and print them; 0 if every row meets its goal."""
    torch.set_num_threads(1)
    size = Size(arguments.quick)
    sections = {
        name: Section(title, partial(measure, size))
        for name, (title, measure) in SECTIONS.items()
        if name in arguments.only
    }
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: no row of cuda"
    scale = f"ratios: medians of {ROUNDS} pairs, each side first in every other"
    return report(sections, Benchmark("blocks", "machine", scale, {"GPU": cuda}), arguments)


def _pool_time(policy: str, identities: list[bytes], names: list[BlockName]) -> int:
    """Of the processor: nothing is waited for."""
    num_blocks = len(names) // 2
    pool = BlockPool(num_blocks, eviction_of(policy, num_blocks))
    start = process_time_ns()
    for first in range(0, len(names), POOL_RUN_BLOCKS):
        run = slice(first, first + POOL_RUN_BLOCKS)
        blocks = pool.register(pool.allocate(len(names[run])), names[run])
        pool.release(pool.match(identities[run]))
        pool.release(blocks)
        pool.take_changes()
    return process_time_ns() - start


def _identity(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def _name(identity: bytes, before: bytes | None) -> BlockName:
    return BlockName(identity, int.from_bytes(identity[:8], "little"), before)


def _against_memcpy(
    name: str, goal: float, call: Callable[[], object], staging: torch.Tensor
) -> Row:
    """Both by processor time: one thread, and nothing is waited for."""
    target = torch.empty_like(staging)
    memcpy = _timed(lambda: target.copy_(staging), process_time_ns)
    ours = _timed(call, process_time_ns)
    return _paired(name, goal, *_in_turn(ours, memcpy), staging.numel())


def _timed(
    call: Callable[[], object], clock: Callable[[], int] = perf_counter_ns
) -> Callable[[int], int]:
    def time(_: int) -> int:
        start = clock()
        call()
        return clock() - start

    return time


class Paired(Row, frozen=True):
    """Figures of both sides; the ratio is the median of those of neighbouring runs, which a machine
    that is busy now and then slows alike.
    """

    pairs: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        return median(self.pairs)


def _in_turn(ours: Callable[[int], int], peer: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """Times of both, ours first in every other round; a round before is not kept."""
    mine: list[int] = []
    others: list[int] = []
    gc.collect()
    gc.disable()
    try:
        for number in range(ROUNDS + 1):
            turns = [(ours, mine), (peer, others)]
            for side, times in turns if number % 2 else reversed(turns):
                times.append(side(number))
    finally:
        gc.enable()
    return mine[1:], others[1:]


def _paired(name: str, goal: float, ours: list[int], peer: list[int], size_bytes: int) -> Row:
    """`size_bytes` were moved in each of these times."""
    rates = [size_bytes / median(times) for times in (ours, peer)]
    pairs = tuple(theirs / mine for mine, theirs in zip(ours, peer, strict=True))
    return Paired(name, *rates, "GB/s", goal, lower=False, pairs=pairs)
