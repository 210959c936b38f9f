"""Handles: the use of a pool's blocks by one request, with an end.

    Tier.allocate ─▶ MutableBlocks ──register──▶ ImmutableBlocks ─▶ released
    Tier.match ──────────────────────────────────────▲    │ weak
                                                     └── WeakBlocks   (keeps no block in the pool)
                                                  upgrade

A handle has the blocks of one request, in prompt order, and is released once: by a call, by `with`,
or, if its owner lost it, when it is garbage-collected. The last case is counted.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from router.errors import InvalidFieldError
from worker_agent.blocks.errors import NotEnoughBlocksError, PoolClosedError, ReleasedBlocksError
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import PoolStatus


class Tier:
    """A pool that allocates its blocks in handles, until it is closed."""

    __slots__ = ("__weakref__", "_collected", "_is_closed", "leaked_blocks", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.leaked_blocks = 0
        """Blocks that were not released before their handle was garbage-collected."""
        self._collected: deque[tuple[int, ...]] = deque()
        self._is_closed = False

    @property
    def status(self) -> PoolStatus:
        """The numbers of active, inactive and empty blocks."""
        self._take_back()
        return self.pool.status

    def allocate(self, count: int) -> "MutableBlocks":
        """Allocate blocks to fill.

        Raises NotEnoughBlocksError, allocating none; PoolClosedError.
        """
        self._ready()
        blocks = self.pool.allocate(count)
        if blocks is None:
            raise NotEnoughBlocksError(count, self.pool.available_blocks)
        return MutableBlocks(self, blocks)

    def match(self, identities: Sequence[bytes]) -> "ImmutableBlocks":
        """Use the leading blocks of a prompt that are in the pool; there may be none.

        Raises PoolClosedError.
        """
        self._ready()
        return ImmutableBlocks(self, self.pool.match(identities))

    def close(self) -> None:
        """Allocate no further blocks; those in use can still be released."""
        self._is_closed = True

    def collected(self, blocks: tuple[int, ...]) -> None:
        """Queue the blocks of a handle that was collected without a release.

        This may happen in the middle of any call of the pool, so its blocks are released before the
        next call.
        """
        self._collected.append(blocks)

    def _ready(self) -> None:
        if self._is_closed:
            raise PoolClosedError
        self._take_back()

    def _take_back(self) -> None:
        while self._collected:
            blocks = self._collected.popleft()
            self.leaked_blocks += len(blocks)
            self.pool.release(blocks)


class Handle:
    """Blocks in use until `release`."""

    __slots__ = ("__weakref__", "_blocks", "_finalizer", "tier")

    def __init__(self, tier: Tier, blocks: Sequence[int]) -> None:
        self.tier = tier
        self._blocks: tuple[int, ...] | None = tuple(blocks)
        self._finalizer = weakref.finalize(self, tier.collected, self._blocks)
        self._finalizer.atexit = False

    def __len__(self) -> int:
        return len(self.block_ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.is_live:
            self.release()

    @property
    def is_live(self) -> bool:
        """True until the handle is released."""
        return self._blocks is not None

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks, in prompt order. Raises ReleasedBlocksError."""
        if self._blocks is None:
            raise ReleasedBlocksError
        return self._blocks

    def release(self) -> None:
        """Stop using the blocks. Raises ReleasedBlocksError the second time."""
        self.tier.pool.release(self._given_up())

    def _given_up(self) -> tuple[int, ...]:
        blocks = self.block_ids
        self._finalizer.detach()
        self._blocks = None
        return blocks


class MutableBlocks(Handle):
    """Blocks that only this handle's owner may fill."""

    __slots__ = ()

    def register(self, names: Sequence[BlockName], priority: int = 0) -> "ImmutableBlocks":
        """Name the filled blocks, so that other requests may use them; this handle ends.

        If another block holds the same content, it may replace the block in the new handle. Raises
        ReleasedBlocksError; InvalidFieldError for another number of names, changing nothing.
        """
        if len(names) != len(self):
            raise InvalidFieldError("names", f"{len(names)}", f"{len(self)}, one per block")
        blocks = self.tier.pool.register(self.block_ids, names, priority)
        self._given_up()
        return ImmutableBlocks(self.tier, blocks)

    def split(self, count: int) -> tuple["MutableBlocks", "MutableBlocks"]:
        """Return the first `count` blocks and the others, each to be released; this handle ends.

        Raises ReleasedBlocksError.
        """
        blocks = self._given_up()
        return MutableBlocks(self.tier, blocks[:count]), MutableBlocks(self.tier, blocks[count:])


class ImmutableBlocks(Handle):
    """Filled blocks, which other requests may use, too."""

    __slots__ = ()

    def share(self) -> "ImmutableBlocks":
        """Return another handle on the same blocks, to be released separately."""
        return ImmutableBlocks(self.tier, self.tier.pool.use_again(self.block_ids))

    def weak(self) -> "WeakBlocks":
        """Return a weak handle, which can find these blocks again and does not keep them."""
        pool = self.tier.pool
        names = [pool.name(block) for block in self.block_ids]
        return WeakBlocks(self.tier, [name.identity for name in names if name is not None])


class WeakBlocks:
    """Blocks that may be evicted at any time."""

    __slots__ = ("_identities", "_tier")

    def __init__(self, tier: Tier, identities: Sequence[bytes]) -> None:
        self._tier = tier
        self._identities = identities

    def upgrade(self) -> ImmutableBlocks:
        """Use the leading blocks that are still in the pool; there may be none."""
        return self._tier.match(self._identities)
