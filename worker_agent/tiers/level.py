"""A running tier: its thread, its start-up, the offload queue into it, and its load speed.

A tier's start-up: adoption of the blocks that earlier processes left, then a measurement.

    adopt a part ─▶ other waiting calls ─▶ adopt the next … until none or no time is left: probe

Blocks can thus be loaded from a large tier, and stored in it, long before all of it is verified.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from msgspec import Struct
from torch import Tensor

from router.protocol.values import Tier
from worker_agent.blocks.changes import MergedTiers
from worker_agent.offload.load_or_recompute import TierSpeed
from worker_agent.offload.policies import OffloadPolicy
from worker_agent.offload.probe import ProbedTier, TierProbe
from worker_agent.offload.queue import OffloadQueue, StorePace
from worker_agent.tiers.offload_lane import EdgeCounters, OffloadLane
from worker_agent.tiers.worker import Finished, Spent, TierJob, TierWorker
from worker_agent.transfer.block_tier import BlockGiver, BlockTier, TierCounters
from worker_agent.transfer.slots import aligned_rows

BURST_BATCHES = 4
"""Number of batches that may be stored at once after an idle period."""


class Level(Struct, frozen=True):
    """Configuration of a tier below the device. `policy`: admits the blocks worth storing there."""

    tier: Tier
    store: BlockTier
    policy: OffloadPolicy
    is_shared: bool = False
    """True if other workers write there too; it may hold blocks that no change reported."""


class StackSettings(Struct, frozen=True):
    """Settings common to all tiers of a rank."""

    block_bytes: int
    batch_blocks: int = 16
    """Blocks in one call to a tier; a running call is not interrupted."""
    max_waiting_blocks: int = 65_536
    """Limit of blocks that wait for each tier; beyond it, the least urgent are not stored."""
    max_loading_blocks: int = 4096
    """Limit of blocks being loaded; beyond it, blocks are computed."""
    store_bytes_per_s: float = 2e9
    """Limit of the store rate into each tier; a tenth of it applies while requests are decoded."""
    adopt_timeout_s: float = 600.0
    """Time limit for verifying persisted blocks; those not verified by then are not used."""
    drain_s: float = 10.0
    """Time limit at shutdown for storing the waiting blocks."""
    max_waiting_calls: int = 4096
    """Limit of calls that wait for a tier; a call beyond it fails."""


class TierStatus(Struct, frozen=True):
    """State and counters of a tier of the stack."""

    tier: Tier
    is_broken: bool
    is_busy: bool
    """True if blocks are being stored in this tier."""
    num_blocks: int
    held_blocks: int
    waiting_blocks: int
    dropped_blocks: int
    """Waiting blocks displaced by more urgent ones, or given up at shutdown."""
    pace_blocks_per_s: float
    """Present limit of the store rate."""
    store: TierCounters
    down: EdgeCounters
    up: EdgeCounters
    probe: TierProbe | None
    """Measurement at start; None if there is none."""


class BlockSource:
    """A running block source: a tier or another worker.

    Belongs to the stack's owner, except for what runs on `worker`'s thread.
    """

    __slots__ = ("is_sampled", "speed", "store", "up", "worker")

    def __init__(
        self,
        name: str,
        store: BlockGiver,
        settings: StackSettings,
        on_finished: Callable[[Finished], None],
        *,
        up: EdgeCounters | None = None,
        is_sampled: bool = False,
    ) -> None:
        """Start the source's thread.

        `up`: counters of loaded blocks; new ones if None. `is_sampled`: only a sample of the loaded
        blocks is verified.
        """
        self.store = store
        self.is_sampled = is_sampled
        self.speed = TierSpeed(settings.block_bytes)
        self.up = EdgeCounters() if up is None else up
        self.worker = TierWorker(name, store, settings.max_waiting_calls, on_finished)


class WorkingLevel(BlockSource):
    """A running tier of the stack.

    Belongs to the stack's owner, except for what runs on `worker`'s thread.
    """

    __slots__ = ("bit", "held_blocks", "is_probed", "is_shared", "probe", "tier", "way")

    store: BlockTier

    def __init__(
        self,
        level: Level,
        settings: StackSettings,
        on_finished: Callable[["WorkingLevel", Finished], None],
    ) -> None:
        name, is_sampled = level.tier.name.lower(), level.tier is Tier.HOST
        self.tier = level.tier
        self.bit = 1 << level.tier
        self.is_shared = level.is_shared
        self.held_blocks = 0
        self.is_probed = False
        self.probe: TierProbe | None = None
        blocks_per_s = settings.store_bytes_per_s / settings.block_bytes
        self.way = OffloadLane(
            OffloadQueue(settings.max_waiting_blocks),
            level.policy,
            StorePace(blocks_per_s, BURST_BATCHES * settings.batch_blocks),
            settings.batch_blocks,
        )
        super().__init__(
            name, level.store, settings, partial(on_finished, self), is_sampled=is_sampled
        )

    def status(self) -> TierStatus:
        """Return the tier's state and counters. Any thread may call it."""
        return TierStatus(
            self.tier,
            self.worker.is_broken,
            bool(self.way.batches),
            self.store.num_blocks,
            self.held_blocks,
            len(self.way.queue),
            self.way.queue.dropped_blocks,
            self.way.pace.blocks_per_s,
            self.store.counters,
            self.way.counters,
            self.up,
            self.probe,
        )

    def probed(self) -> ProbedTier:
        """Return the tier's size and measurement, for sizing advice."""
        return ProbedTier(self.tier.name.lower(), self.store.num_blocks, self.probe, self.is_probed)

    def note_probe(self, probe: TierProbe | None) -> None:
        """Record the measurement at start; load times follow from it until blocks are loaded."""
        self.is_probed = True
        self.probe = probe
        if probe is not None:
            self.speed.note_probe(probe)


class Levels(Struct, frozen=True):
    """The tiers of a stack, fastest first, and the index of the blocks that they hold."""

    settings: StackSettings
    levels: Sequence[WorkingLevel]
    held: MergedTiers

    def has(self, index: int, identity: bytes) -> bool:
        """Return whether a tier is known to hold this block."""
        return bool(self.held.tiers(identity) & self.levels[index].bit)


PROBE_BYTES = 16 * 1024 * 1024
MAX_PROBE_BLOCKS = 64


class TierStartup:
    """Start-up of one tier; belongs to the stack's owner."""

    __slots__ = ("_level", "_parts", "_settings")

    def __init__(self, level: WorkingLevel, settings: StackSettings) -> None:
        rows = aligned_rows(settings.batch_blocks, settings.block_bytes)
        self._level = level
        self._settings = settings
        self._parts = level.store.adopt(rows, time.monotonic() + settings.adopt_timeout_s)

    def go_on(self) -> None:
        """Queue the next call, behind the calls that already wait for the tier."""
        self._level.worker.submit(TierJob(self._adopt_part, self._adopted))

    def end(self) -> None:
        """Stop adopting blocks. The tier's thread must not be adopting at that time."""
        self._parts.close()

    def _adopt_part(self) -> bool:
        """Adopt the next part and return whether there may be more."""
        return any(True for _ in self._parts)

    def _adopted(self, is_more: bool | None, spent: Spent) -> None:
        del spent
        if is_more:
            self.go_on()
            return
        block_bytes = self._settings.block_bytes
        blocks = max(min(PROBE_BYTES // block_bytes, MAX_PROBE_BLOCKS), 1)
        rows = aligned_rows(blocks, block_bytes)
        self._level.worker.submit(TierJob(partial(_probe, self._level.store, rows), self._probed))

    def _probed(self, probe: TierProbe | None, spent: Spent) -> None:
        del spent
        self._level.note_probe(probe)


def _probe(store: BlockTier, rows: Tensor) -> TierProbe | None:
    noise = bytearray(os.urandom(rows.shape[1]))  # No file system can compress random bytes.
    rows[:] = torch.frombuffer(noise, dtype=torch.uint8)
    return store.probe(rows)
