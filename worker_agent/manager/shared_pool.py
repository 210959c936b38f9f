"""A thread-safe block pool: each call completes before another begins.

An engine with its own pool needs no lock, and uses `BlockPool`.
"""

from collections.abc import Iterable, Sequence
from threading import RLock

from worker_agent.blocks.changes import Change
from worker_agent.blocks.eviction.base import Eviction
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool import BlockPool
from worker_agent.blocks.pool_values import (
    BlockMetadata,
    Duplicates,
    NamedBlocks,
    PoolStatus,
    ResetOutcome,
)


class SharedPool(BlockPool):
    """A pool for any thread; calls wait only for each other's bookkeeping."""

    __slots__ = ("_lock",)

    def __init__(
        self, num_blocks: int, eviction: Eviction, duplicates: Duplicates = Duplicates.REJECTED
    ) -> None:
        super().__init__(num_blocks, eviction, duplicates)
        self._lock = RLock()

    @property
    def available_blocks(self) -> int:
        """See BlockPool."""
        with self._lock:
            return super().available_blocks

    @property
    def status(self) -> PoolStatus:
        """See BlockPool."""
        with self._lock:
            return super().status

    @property
    def private_blocks(self) -> int:
        """See BlockPool."""
        with self._lock:
            return super().private_blocks

    def metadata(self, block: int) -> BlockMetadata:
        """See BlockPool."""
        with self._lock:
            return super().metadata(block)

    def matching(self, identities: Sequence[bytes]) -> int:
        """See BlockPool."""
        with self._lock:
            return super().matching(identities)

    def scan(self, identities: Iterable[bytes]) -> list[int | None]:
        """See BlockPool."""
        with self._lock:
            return super().scan(identities)

    def named(self) -> NamedBlocks:
        """See BlockPool."""
        with self._lock:
            return super().named()

    def match(self, identities: Sequence[bytes]) -> list[int]:
        """See BlockPool."""
        with self._lock:
            return super().match(identities)

    def match_scattered(self, identities: Sequence[bytes]) -> list[int | None]:
        """See BlockPool."""
        with self._lock:
            return super().match_scattered(identities)

    def hold(self, identities: Sequence[bytes]) -> list[int | None]:
        """See BlockPool."""
        with self._lock:
            return super().hold(identities)

    def use_again(self, blocks: Sequence[int]) -> Sequence[int]:
        """See BlockPool."""
        with self._lock:
            return super().use_again(blocks)

    def allocate(self, count: int) -> list[int] | None:
        """See BlockPool."""
        with self._lock:
            return super().allocate(count)

    def register(
        self, blocks: Sequence[int], names: Sequence[BlockName], priority: int = 0
    ) -> list[int]:
        """See BlockPool."""
        with self._lock:
            return super().register(blocks, names, priority)

    def claim(self, blocks: Iterable[int]) -> list[int]:
        """See BlockPool."""
        with self._lock:
            return super().claim(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """See BlockPool."""
        with self._lock:
            super().release(blocks)

    def touch(self, identities: Sequence[bytes]) -> int:
        """See BlockPool."""
        with self._lock:
            return super().touch(identities)

    def reset(self) -> None:
        """See BlockPool."""
        with self._lock:
            super().reset()

    def reset_blocks(self, identities: Iterable[bytes]) -> ResetOutcome:
        """See BlockPool."""
        with self._lock:
            return super().reset_blocks(identities)

    def forget(self, identities: Iterable[bytes]) -> int:
        """See BlockPool."""
        with self._lock:
            return super().forget(identities)

    def clear(self) -> None:
        """See BlockPool."""
        with self._lock:
            super().clear()

    def take_changes(self) -> list[Change]:
        """See BlockPool."""
        with self._lock:
            return super().take_changes()

    def check_invariants(self) -> None:
        """See BlockPool."""
        with self._lock:
            super().check_invariants()
