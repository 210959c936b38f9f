"""A tier's first calls: what a former life left is taken over, then it is measured.

    adopt a part ─▶ whoever else waits ─▶ adopt the next … until nothing, or no time, is left: probe

So blocks can be loaded from a large tier, and stored in it, long before all of it is proven.
"""

import os
import time
from functools import partial

import torch
from torch import Tensor

from worker_agent.offload.probe import TierProbe
from worker_agent.tiers.level import StackSettings, WorkingLevel
from worker_agent.tiers.worker import Call, Spent
from worker_agent.transfer.block_tier import BlockTier
from worker_agent.transfer.slots import aligned_rows

PROBE_BYTES = 16 * 1024 * 1024
MAX_PROBE_BLOCKS = 64


class Starting:
    """Of one tier; belongs to the stack's owner."""

    __slots__ = ("_level", "_parts", "_settings")

    def __init__(self, level: WorkingLevel, settings: StackSettings) -> None:
        rows = aligned_rows(settings.batch_blocks, settings.block_bytes)
        self._level = level
        self._settings = settings
        self._parts = level.store.adopt(rows, time.monotonic() + settings.adopt_timeout_s)

    def go_on(self) -> None:
        """The next call, after what was asked of the tier before."""
        self._level.worker.submit(Call(self._adopt_part, self._adopted))

    def end(self) -> None:
        """What is not taken over will not be. Not while the tier's thread is at it."""
        self._parts.close()

    def _adopt_part(self) -> bool:
        """Whether there may be more."""
        return any(True for _ in self._parts)

    def _adopted(self, is_more: bool | None, spent: Spent) -> None:
        del spent
        if is_more:
            self.go_on()
            return
        block_bytes = self._settings.block_bytes
        blocks = max(min(PROBE_BYTES // block_bytes, MAX_PROBE_BLOCKS), 1)
        rows = aligned_rows(blocks, block_bytes)
        self._level.worker.submit(Call(partial(_probe, self._level.store, rows), self._probed))

    def _probed(self, probe: TierProbe | None, spent: Spent) -> None:
        del spent
        self._level.note_probe(probe)


def _probe(store: BlockTier, rows: Tensor) -> TierProbe | None:
    noise = bytearray(os.urandom(rows.shape[1]))  # nothing that a file system could pack
    rows[:] = torch.frombuffer(noise, dtype=torch.uint8)
    return store.probe(rows)
