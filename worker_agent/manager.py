"""KvBlockManager: the blocks of one rank in all its tiers, put together from configuration.

    configuration ─▶ 1 runtime ─▶ 2 layout of each tier ─▶ 3 memory, registered
                                 ─▶ 4 block sets ─▶ 5 pools ─▶ TierStack: what moves between them

Constructing and closing touch files and large memory, and block: from an event loop, use `opened`
and `aclose`. Everything else returns at once, on any thread.

Source: `KvBlockManager` of Dynamo's first block manager.
"""

import asyncio
import logging
import weakref
from contextlib import ExitStack
from threading import Thread
from typing import Self

from router.block_errors import PoolClosedError
from worker_agent.block_sets import BlockSet, TierMemory, open_memory
from worker_agent.blocks.handles import Tier
from worker_agent.blocks.levels import CacheLevel
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import PoolStatus
from worker_agent.cancellation import Cancellation
from worker_agent.manager_config import (
    BlockManagerConfig,
    RuntimeConfig,
    TierLayout,
    eviction_of,
)
from worker_agent.manager_stack import stack_of
from worker_agent.shared_pool import SharedPool
from worker_agent.storage.registered import LayoutHandle, RegisteredLayouts
from worker_agent.tiers.stack import TierStack

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


class KvBlockManager:
    """Pools over registered layouts over memory. Closing it, cancelling it, or forgetting it ends
    what is inside; blocks that are in use may still be released.
    """

    __slots__ = ("__weakref__", "_finalizer", "_inside", "cancellation")

    def __init__(
        self, config: BlockManagerConfig, cancellation: Cancellation | None = None
    ) -> None:
        """`cancellation`: what this is to end with. Raises StorageError, LayoutError and
        RegistrationError, leaving nothing behind.
        """
        self.cancellation = Cancellation() if cancellation is None else cancellation.child()
        self._inside = _Inside(config, self.cancellation.child())
        self._finalizer = weakref.finalize(self, _end_later, self.cancellation, self._inside)
        self._finalizer.atexit = False

    @property
    def stack(self) -> TierStack:
        """What moves blocks between the device and the tiers below; one thread owns it."""
        return self._inside.stack

    @property
    def block_bytes(self) -> int:
        """Of a block, without padding."""
        return self._inside.block_bytes

    @classmethod
    async def opened(
        cls, config: BlockManagerConfig, cancellation: Cancellation | None = None
    ) -> Self:
        """Construct it without blocking the event loop."""
        return await asyncio.to_thread(cls, config, cancellation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def worker_id(self) -> int:
        """Whose it is."""
        return self._inside.layouts.worker_id

    def device(self) -> Tier | None:
        """Blocks of the device; None if it has none. Raises PoolClosedError."""
        return self._blocks(CacheLevel.G1)

    def host(self) -> Tier | None:
        """Blocks of the host; None if it has none. Raises PoolClosedError."""
        return self._blocks(CacheLevel.G2)

    def disk(self) -> Tier | None:
        """Blocks on disk; None if it has none. Raises PoolClosedError."""
        return self._blocks(CacheLevel.G3)

    def block_sets(self) -> dict[CacheLevel, BlockSet]:
        """Every tier it has, fastest first. Raises PoolClosedError."""
        self._check_open()
        return dict(self._inside.sets)

    def layouts(self) -> RegisteredLayouts:
        """Its layouts, as transfers and peers name them. Raises PoolClosedError."""
        self._check_open()
        return self._inside.layouts

    def status(self) -> dict[CacheLevel, PoolStatus]:
        """Every tier's blocks, by what becomes of them."""
        return {level: each.blocks.status for level, each in self._inside.sets.items()}

    def advice(self) -> list[str]:
        """What whoever configured the tiers should know, from what was measured until now."""
        device = self._inside.sets.get(CacheLevel.G1)
        if device is None:
            return []
        config = device.memory.layout.config
        return self.stack.advice(config.num_blocks, config.page_size)

    def pools(self) -> dict[CacheLevel, BlockPool]:
        """The pool of every tier, fastest first; of use to look at also once it is closed."""
        return {level: each.blocks.pool for level, each in self._inside.sets.items()}

    def cancel(self) -> None:
        """Hand out no block any more; memory stays until it is closed."""
        self.cancellation.cancel()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Store what waits (for `Offload.drain_s`), end what is under way, and give all memory
        back; again is nothing. Blocking; for the stack's owner, or once it is gone.

        A tier that does not end in time keeps its memory, and ends by itself. A peer that cannot
        let go of memory raises what it raises; that memory stays.
        """
        self.cancel()
        if self._finalizer.detach() is not None:
            self._inside.stack.drain()
            self._inside.close(timeout_s)

    async def aclose(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close it without blocking the event loop."""
        await asyncio.to_thread(self.close, timeout_s)

    def _blocks(self, level: CacheLevel) -> Tier | None:
        self._check_open()
        found = self._inside.sets.get(level)
        return None if found is None else found.blocks

    def _check_open(self) -> None:
        if self.cancellation.is_cancelled:
            raise PoolClosedError


class _Inside:
    """What a manager is made of. It does not know the manager, so that this can be forgotten."""

    __slots__ = ("__weakref__", "_cancellation", "block_bytes", "layouts", "sets", "stack")

    def __init__(self, config: BlockManagerConfig, cancellation: Cancellation) -> None:
        self._cancellation = cancellation
        self.block_bytes = config.model.layout(1, 1).block_bytes
        self.layouts = RegisteredLayouts(config.runtime.worker_id)
        self.sets: dict[CacheLevel, BlockSet] = {}
        layouts = {
            level: config.model.layout(tier.num_blocks, tier.alignment)
            for level, tier in config.tiers.items()
        }
        with ExitStack() as undo:
            for level, tier in config.tiers.items():
                agent, fingerprint = str(config.runtime.worker_id), config.model.fingerprint
                memory = open_memory(agent, tier, layouts[level], fingerprint)
                undo.callback(memory.close)
                handle = self._registered(level, memory, config.runtime)
                blocks = _pool_of(level, tier)
                self.sets[level] = BlockSet(len(self.sets), level, memory, handle, blocks)
            self.stack = stack_of(config, self.sets)
            undo.pop_all()
        for each in self.sets.values():
            cancellation.when_cancelled(each.blocks.close)

    def close(self, timeout_s: float) -> None:
        """Let the stack end, which closes what is below the device, then give the device's memory
        back.
        """
        if not self.stack.close(timeout_s):
            log.error("a tier did not end within %g s, and keeps its memory", timeout_s)
        for level, each in self.sets.items():
            in_use = each.blocks.status.active_blocks
            if in_use:
                log.warning("%s: %d blocks are in use that go", level, in_use)
            if each.blocks.leaked_blocks:
                log.warning("%s: %d blocks were never released", level, each.blocks.leaked_blocks)
        if CacheLevel.G1 in self.sets:
            self.sets[CacheLevel.G1].memory.close()

    def _registered(
        self, level: CacheLevel, memory: TierMemory, runtime: RuntimeConfig
    ) -> LayoutHandle | None:
        if not runtime.registers_layouts:
            return None
        return self.layouts.register(level.tier, memory.layout, memory.storages)


def _pool_of(level: CacheLevel, tier: TierLayout) -> Tier:
    default = "lru" if level is CacheLevel.G1 else "lineage"
    eviction = eviction_of(tier.eviction or default, tier.num_blocks)
    return Tier(SharedPool(tier.num_blocks, eviction, tier.duplicates))


def _end_later(cancellation: Cancellation, inside: _Inside) -> None:
    """The manager was forgotten, on whatever thread: closing may block, and is done on another."""
    cancellation.cancel()
    Thread(target=inside.close, args=(CLOSE_TIMEOUT_S,), name="block-manager-close").start()
