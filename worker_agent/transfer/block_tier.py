"""Interfaces and counters common to all tiers below the device, and measurement of speed."""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from msgspec import Struct
from torch import Tensor

from worker_agent.blocks.changes import Change
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool_values import PoolStatus, ResetOutcome
from worker_agent.offload.probe import TierProbe
from worker_agent.transfer.plan import BlockResult


class TierCounters(Struct):
    """Counters of a tier since creation, in blocks."""

    stored: int = 0
    loaded: int = 0
    full: int = 0
    """Not stored: every slot was in use."""
    failed: int = 0
    """Neither stored nor loaded: the storage reported an error."""
    corrupt: int = 0
    """Dropped: the bytes differ from those stored."""
    adopted: int = 0
    unproven: int = 0
    """Left by an earlier process, and not readable, or not verified in time."""


class BlockGiver(Protocol):
    """A source of blocks by name.

    Calls block and belong to a thread, one at a time. They do not raise: errors are outcomes.
    `rows`: (n, block bytes) uint8 on the host; `rows[i]` is block i.
    """

    counters: TierCounters

    def load(
        self, identities: Sequence[bytes], rows: Tensor, *, is_sampled: bool = False
    ) -> Sequence[BlockResult]:
        """Copy blocks into rows and verify that they are what was stored.

        A row may hold any bytes if its outcome is not DONE. `is_sampled`: a tier in memory may
        verify only some of the blocks. Not for blocks that will be stored again, because storing
        would certify wrong bytes with a new checksum.
        """

    def take_changes(self) -> list[Change]:
        """Return the changes of names since the last call, in order."""

    def close(self) -> None:
        """Release the storage; blocks in persistent storage stay there."""


class BlockTier(BlockGiver, Protocol):
    """A tier that stores blocks by name."""

    @property
    def num_blocks(self) -> int:
        """Capacity in blocks."""

    @property
    def is_kept(self) -> bool:
        """True if blocks outlive this process."""

    @property
    def status(self) -> PoolStatus:
        """Number of blocks by state."""

    def store(
        self, names: Sequence[BlockName], rows: Tensor, priority: int = 0
    ) -> Sequence[BlockResult]:
        """Store blocks."""

    def adopt(self, rows: Tensor, until_s: float) -> Generator[None]:
        """Recover the blocks that an earlier process left, part by part, until `until_s`.

        `until_s`: in the time of `time.monotonic`. `rows`: a buffer; its length is the number of
        blocks read at a time.
        """

    def probe(self, rows: Tensor) -> TierProbe | None:
        """Measure the tier without changing a name; return None if that is not possible.

        `rows`: at least one; they are written and read.
        """

    def touch(self, identities: Sequence[bytes]) -> None:
        """Mark these blocks as used now."""

    def remove(self, identities: Sequence[bytes]) -> ResetOutcome:
        """Remove these blocks, except those in use."""

    def reset(self) -> None:
        """Remove all blocks. Raises PoolInUseError if a block is in use."""

    def clear(self) -> None:
        """Remove all blocks."""


def measured(
    rows: Tensor,
    write: Callable[[], Sequence[BlockResult]],
    read: Callable[[int], Sequence[BlockResult]],
) -> TierProbe | None:
    """Write all rows, read them, read the first again, and return the speeds.

    Returns None if any block fails.
    """
    times_s = [time.perf_counter()]
    written = write()
    times_s.append(time.perf_counter())
    arrived = read(len(rows))
    times_s.append(time.perf_counter())
    again = read(1)
    times_s.append(time.perf_counter())
    if {*written, *arrived, *again} != {BlockResult.DONE}:
        return None
    return TierProbe.of(rows.numel(), len(rows), times_s)
