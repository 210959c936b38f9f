"""Who uses which blocks of a pool, with an end to it.

    Tier.allocate ─▶ MutableBlocks ──register──▶ ImmutableBlocks ─▶ released
    Tier.match ──────────────────────────────────────▲    │ weak
                                                     └── WeakBlocks   (keeps nothing in the pool)
                                                  upgrade

A handle stands for the blocks of one request, in prompt order, and is released once: by hand, by
`with`, or, if its owner forgot it, when it is collected; that is counted.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from router.block_errors import NotEnoughBlocksError, PoolClosedError, ReleasedBlocksError
from router.errors import InvalidFieldError
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import PoolStatus


class Tier:
    """A pool whose blocks are handed out in handles, until it is closed."""

    __slots__ = ("__weakref__", "_collected", "_is_closed", "leaked_blocks", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.leaked_blocks = 0
        """Blocks that nobody released before their handle was collected."""
        self._collected: deque[tuple[int, ...]] = deque()
        self._is_closed = False

    @property
    def status(self) -> PoolStatus:
        """All blocks, by what becomes of them."""
        self._take_back()
        return self.pool.status

    def allocate(self, count: int) -> "MutableBlocks":
        """Blocks to fill. Raises NotEnoughBlocksError, allocating none; PoolClosedError."""
        self._ready()
        blocks = self.pool.allocate(count)
        if blocks is None:
            raise NotEnoughBlocksError(count, self.pool.available_blocks)
        return MutableBlocks(self, blocks)

    def match(self, identities: Sequence[bytes]) -> "ImmutableBlocks":
        """The leading blocks of a prompt that are here; there may be none. Raises
        PoolClosedError.
        """
        self._ready()
        return ImmutableBlocks(self, self.pool.match(identities))

    def close(self) -> None:
        """Hand out no block any more; those in use are released as ever."""
        self._is_closed = True

    def collected(self, blocks: tuple[int, ...]) -> None:
        """A handle was collected that nobody released. This may be in the middle of any call of the
        pool, so that its blocks go back before the next.
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
    """Blocks that somebody uses until `release`."""

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
        """Whether the blocks are still its own."""
        return self._blocks is not None

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Which blocks, in prompt order. Raises ReleasedBlocksError."""
        if self._blocks is None:
            raise ReleasedBlocksError
        return self._blocks

    def release(self) -> None:
        """Use them no longer. Raises ReleasedBlocksError the second time."""
        self.tier.pool.release(self._given_up())

    def _given_up(self) -> tuple[int, ...]:
        blocks = self.block_ids
        self._finalizer.detach()
        self._blocks = None
        return blocks


class MutableBlocks(Handle):
    """Blocks that only this one fills."""

    __slots__ = ()

    def register(self, names: Sequence[BlockName], priority: int = 0) -> "ImmutableBlocks":
        """They are filled, and others may use them; this handle is no more.

        Where another block holds the same, that one may take the place of ours. Raises
        ReleasedBlocksError; InvalidFieldError for another number of names, changing nothing.
        """
        if len(names) != len(self):
            raise InvalidFieldError("names", f"{len(names)}", f"{len(self)}, one a block")
        blocks = self.tier.pool.register(self.block_ids, names, priority)
        self._given_up()
        return ImmutableBlocks(self.tier, blocks)


class ImmutableBlocks(Handle):
    """Filled blocks, which others may use, too."""

    __slots__ = ()

    def share(self) -> "ImmutableBlocks":
        """Another handle on the same blocks, to be released by itself."""
        return ImmutableBlocks(self.tier, self.tier.pool.use_again(self.block_ids))

    def weak(self) -> "WeakBlocks":
        """What finds them again while they are there, and keeps none."""
        pool = self.tier.pool
        names = [pool.name(block) for block in self.block_ids]
        return WeakBlocks(self.tier, [name.identity for name in names if name is not None])


class WeakBlocks:
    """Blocks that may be given up at any time."""

    __slots__ = ("_identities", "_tier")

    def __init__(self, tier: Tier, identities: Sequence[bytes]) -> None:
        self._tier = tier
        self._identities = identities

    def upgrade(self) -> ImmutableBlocks:
        """As many of the leading ones as are still there; there may be none."""
        return self._tier.match(self._identities)
