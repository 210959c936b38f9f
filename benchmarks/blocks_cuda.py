"""Blocks between a GPU and pinned memory, beside one copy of all; and what decode feels of it."""

import threading
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from rows import Row
from timing import Bounded, alternate

from worker_agent.layout.config import LayoutConfig
from worker_agent.layout.strides import LayoutKind
from worker_agent.transfer.device_copies import DeviceCopies
from worker_agent.transfer.physical import physical

BLOCKS = 512
ROUNDS = 7
DECODE_STEPS = 200
CONFIG = LayoutConfig(
    num_blocks=2 * BLOCKS, num_layers=32, outer_dim=2, page_size=16, inner_dim=1024
)
"""2 MiB a block, as an 8 B model has."""


def cuda_rows() -> list[Row]:
    """Both ways for every layout, and decode beside them; nothing where there is no GPU."""
    if not torch.cuda.is_available():
        return []
    device = torch.device("cuda")
    rows: list[Row] = []
    for kind in LayoutKind:
        layout = physical("1").configured(CONFIG).laid_out(kind).allocated_on_device(device)
        copies = DeviceCopies([layout])
        host = copies.host_rows(BLOCKS)
        plain = torch.empty_like(host, device=device)
        blocks = list(range(0, 2 * BLOCKS, 2))
        sides = [
            lambda host=host, plain=plain: host.copy_(plain, non_blocking=True),
            lambda copies=copies, host=host, blocks=blocks: copies.gather(blocks, host).wait(),
            lambda host=host, plain=plain: plain.copy_(host, non_blocking=True),
            lambda copies=copies, host=host, blocks=blocks: copies.scatter(blocks, host).wait(),
        ]
        times = alternate([_timed(side) for side in sides], ROUNDS, warm_up=True)
        rows.append(_rate(f"to the host {kind}", times[1], times[0], host.numel()))
        rows.append(_rate(f"from the host {kind}", times[3], times[2], host.numel()))
        rows.append(_decode_row(kind, copies, blocks, host))
        layout.close()
    return rows


def _decode_row(
    kind: LayoutKind, copies: DeviceCopies, blocks: list[int], host: torch.Tensor
) -> Row:
    """How much longer steps of decode take while blocks are stored; as much as may be: 10 %."""
    weights = [torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
    state = torch.randn(16, 8192, dtype=torch.bfloat16, device="cuda")
    alone, beside = alternate(
        [
            lambda _: _decode_ms(weights, state),
            lambda _: _beside(lambda: copies.gather(blocks, host).wait(), weights, state),
        ],
        ROUNDS,
        warm_up=True,
    )
    slower = 100 * (median(beside) / median(alone) - 1)
    return Bounded(f"decode slower {kind}", max(slower, 0.01), 10, "%", 10, lower=True)


def _beside(store: Callable[[], object], weights: list[torch.Tensor], state: torch.Tensor) -> float:
    ended = threading.Event()

    def storing() -> None:
        while not ended.is_set():
            store()

    thread = threading.Thread(target=storing)
    thread.start()
    try:
        return _decode_ms(weights, state)
    finally:
        ended.set()
        thread.join()


def _decode_ms(weights: list[torch.Tensor], state: torch.Tensor) -> float:
    """Steps that read all weights, as decode does."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(DECODE_STEPS):
        for weight in weights:
            torch.matmul(state, weight)
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended)


def _timed(call: Callable[[], object]) -> Callable[[int], float]:
    """Milliseconds until the device has done it, on whatever stream."""

    def time(_: int) -> float:
        torch.cuda.synchronize()
        begun_s = perf_counter()
        call()
        torch.cuda.synchronize()
        return 1e3 * (perf_counter() - begun_s)

    return time


def _rate(name: str, ours: list[float], plain: list[float], size_bytes: int) -> Row:
    rates = [size_bytes / median(times) / 1e6 for times in (ours, plain)]
    return Row(name, *rates, "GB/s", 0.8, lower=False)
