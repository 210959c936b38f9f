"""What all tiers below the device have in common, whatever their blocks lie in."""

from collections.abc import Generator, Sequence
from typing import Protocol

from msgspec import Struct
from torch import Tensor

from worker_agent.blocks.changes import Change
from worker_agent.blocks.names import BlockName
from worker_agent.blocks.pool_values import PoolStatus, ResetOutcome
from worker_agent.offload.probe import TierProbe
from worker_agent.transfer.outcome import Outcome


class TierCounters(Struct):
    """What went through a tier since it was made, in blocks."""

    stored: int = 0
    loaded: int = 0
    full: int = 0
    """Not stored, for every slot was in use."""
    failed: int = 0
    """Neither stored nor loaded, for the storage said so."""
    corrupt: int = 0
    """Given up, for their bytes were not those that were stored."""
    adopted: int = 0
    unproven: int = 0
    """A former life left them, and they could not be read, or not in time."""


class BlockGiver(Protocol):
    """Gives blocks by their names. Calls block, for a thread, one at a time, and raise nothing:
    what went wrong is an outcome. `rows`: (n, block bytes) uint8 on the host; `rows[i]` is block i.
    """

    counters: TierCounters

    def load(
        self, identities: Sequence[bytes], rows: Tensor, *, is_sampled: bool = False
    ) -> Sequence[Outcome]:
        """Copy blocks into rows, each proven to be what was stored. A row that is not DONE may hold
        anything. `is_sampled`: memory may prove some only; never for what is to be stored again,
        where it would be certified.
        """

    def take_changes(self) -> list[Change]:
        """What happened to names since the last call, in order."""

    def close(self) -> None:
        """Let go of what the blocks lie in; what outlives a process stays."""


class BlockTier(BlockGiver, Protocol):
    """Blocks kept under their names."""

    @property
    def num_blocks(self) -> int:
        """Room, in blocks."""

    @property
    def is_kept(self) -> bool:
        """Whether blocks outlive this process."""

    @property
    def status(self) -> PoolStatus:
        """All blocks, by what becomes of them."""

    def store(
        self, names: Sequence[BlockName], rows: Tensor, priority: int = 0
    ) -> Sequence[Outcome]:
        """Keep blocks."""

    def adopt(self, rows: Tensor, until_s: float) -> Generator[None]:
        """Take over what a former life of this process left, part by part, until then
        (`time.monotonic`). `rows`: room for as many as are read at a time.
        """

    def probe(self, rows: Tensor) -> TierProbe | None:
        """How fast it is, changing no name; None if that cannot be found out. `rows`: at least one,
        written and read.
        """

    def touch(self, identities: Sequence[bytes]) -> None:
        """Treat these as if they were used now."""

    def remove(self, identities: Sequence[bytes]) -> ResetOutcome:
        """Give these up, as far as nobody uses them."""

    def reset(self) -> None:
        """Give everything up. Raises PoolInUseError while somebody uses a block."""

    def clear(self) -> None:
        """Give everything up."""
