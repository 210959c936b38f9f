"""KvBlockManager: the blocks of one rank in all its tiers, built from configuration.

KvBlockManager: the blocks of one rank in all its tiers, built from configuration.

    configuration ─▶ 1 runtime ─▶ 2 layout of each tier ─▶ 3 memory, registered
                                 ─▶ 4 block sets ─▶ 5 pools ─▶ TierStack: transfers between tiers

Constructing and closing access files and large memory, and block: from an event loop, use `opened`
and `aclose`. All other methods return at once, on any thread.

Source: `KvBlockManager` of Dynamo's first block manager.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from threading import RLock, Thread
from typing import Self

from worker_agent.blocks.errors import PoolClosedError
from worker_agent.blocks.handles import Tier
from worker_agent.blocks.names import CacheLevel
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import PoolStatus
from worker_agent.manager.config import BlockManagerConfig, RuntimeConfig, TierLayout, eviction_of
from worker_agent.manager.shared_pool import SharedPool
from worker_agent.manager.tier_blocks import BlockSet, TierMemory, open_memory
from worker_agent.manager.tiers import stack_of
from worker_agent.storage.registered import LayoutHandle, RegisteredLayouts
from worker_agent.tiers.stack import TierStack


class CancelToken:
    """A cancel token; cancelling ends it and its children, but not its parent.

    The owner keeps a reference to its token: a child without references is dropped with its
    callbacks.

    Invariant: the children of a cancelled token are cancelled, even if created later.
    """

    __slots__ = ("__weakref__", "_above", "_callbacks", "_children", "_lock", "is_cancelled")

    def __init__(self, above: "CancelToken | None" = None) -> None:
        self._above = above
        self.is_cancelled = False
        """True once cancelled."""
        self._lock = RLock()
        self._children: weakref.WeakSet[CancelToken] = weakref.WeakSet()
        self._callbacks: list[Callable[[], None]] = []

    def child(self) -> "CancelToken":
        """Return a token that is cancelled with this one, or before."""
        child = CancelToken(self)
        with self._lock:
            self._children.add(child)
            if self.is_cancelled:
                child.cancel()
        return child

    def cancel(self) -> None:
        """Cancel it; repeated calls have no effect. Runs the callbacks on this thread."""
        with self._lock:
            self.is_cancelled = True
            callbacks, self._callbacks = self._callbacks, []
            children = list(self._children)
        for callback in callbacks:
            callback()
        for child in children:
            child.cancel()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Call the callback on cancellation; at once if it is cancelled already."""
        with self._lock:
            if not self.is_cancelled:
                self._callbacks.append(callback)
                return
        callback()


log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


class KvBlockManager:
    """Pools over registered layouts over memory.

    Closing, cancelling or collecting it ends its contents; blocks in use may still be released.
    """

    __slots__ = ("__weakref__", "_finalizer", "_inside", "cancellation")

    def __init__(self, config: BlockManagerConfig, cancellation: CancelToken | None = None) -> None:
        """Build all tiers; on an error, everything is freed again.

        `cancellation`: the parent of its cancel token. Raises StorageError, LayoutError and
        RegistrationError.
        """
        self.cancellation = CancelToken() if cancellation is None else cancellation.child()
        self._inside = _Inside(config, self.cancellation.child())
        self._finalizer = weakref.finalize(self, _end_later, self.cancellation, self._inside)
        self._finalizer.atexit = False

    @property
    def stack(self) -> TierStack:
        """The stack that moves blocks between the device and lower tiers, used by one thread."""
        return self._inside.stack

    @property
    def block_bytes(self) -> int:
        """The size of a block, without padding."""
        return self._inside.block_bytes

    @classmethod
    async def opened(
        cls, config: BlockManagerConfig, cancellation: CancelToken | None = None
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
        """Return the id of its worker."""
        return self._inside.layouts.worker_id

    def device(self) -> Tier | None:
        """Return the blocks of the device, or None. Raises PoolClosedError."""
        return self._blocks(CacheLevel.G1)

    def host(self) -> Tier | None:
        """Return the blocks of the host, or None. Raises PoolClosedError."""
        return self._blocks(CacheLevel.G2)

    def disk(self) -> Tier | None:
        """Return the blocks on disk, or None. Raises PoolClosedError."""
        return self._blocks(CacheLevel.G3)

    def block_sets(self) -> dict[CacheLevel, BlockSet]:
        """Return its tiers, fastest first. Raises PoolClosedError."""
        self._check_open()
        return dict(self._inside.sets)

    def layouts(self) -> RegisteredLayouts:
        """Return its layouts, as transfers and peers name them. Raises PoolClosedError."""
        self._check_open()
        return self._inside.layouts

    def status(self) -> dict[CacheLevel, PoolStatus]:
        """Return the blocks of every tier, by state."""
        return {level: each.blocks.status for level, each in self._inside.sets.items()}

    def advice(self) -> list[str]:
        """Return advice on the configured tiers, from the measurements so far."""
        device = self._inside.sets.get(CacheLevel.G1)
        if device is None:
            return []
        config = device.memory.layout.config
        return self.stack.advice(config.num_blocks, config.page_size)

    def pools(self) -> dict[CacheLevel, BlockPool]:
        """Return the pool of every tier, fastest first; may be inspected after closing, too."""
        return {level: each.blocks.pool for level, each in self._inside.sets.items()}

    def cancel(self) -> None:
        """Stop allocating blocks; memory is freed by `close`."""
        self.cancellation.cancel()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Store waiting blocks (for `Offload.drain_s`), end transfers, and free all memory.

        Repeated calls have no effect. Blocking; for the stack's owner, or once it is gone.

        A tier that does not end in time keeps its memory, and ends by itself. If a peer cannot
        release memory, its error is raised and that memory stays.
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
    """The contents of a manager, without a reference to it, so that it can be collected."""

    __slots__ = ("__weakref__", "_cancellation", "block_bytes", "layouts", "sets", "stack")

    def __init__(self, config: BlockManagerConfig, cancellation: CancelToken) -> None:
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
        """Close the stack with all lower tiers, then free the device's memory."""
        if not self.stack.close(timeout_s):
            log.error("a tier did not end within %g s, and keeps its memory", timeout_s)
        for level, each in self.sets.items():
            in_use = each.blocks.status.active_blocks
            if in_use:
                log.warning("%s: %d blocks are still in use while closing", level, in_use)
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


def _end_later(cancellation: CancelToken, inside: _Inside) -> None:
    """Close a manager that was collected, on another thread, since closing may block."""
    cancellation.cancel()
    Thread(target=inside.close, args=(CLOSE_TIMEOUT_S,), name="block-manager-close").start()
