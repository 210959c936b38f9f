"""Blocks of other workers: which they are, and where a prompt's blocks are."""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct, structs

from router.protocol.values import Rank


class Mutability(StrEnum):
    """The operations on a block that other workers may perform."""

    MUTABLE = "mutable"
    """Write and read."""
    IMMUTABLE = "immutable"
    """Read only."""


class BlockDescriptor(Struct, frozen=True):
    """One block of a worker."""

    worker_id: int
    block_set_idx: int
    block_idx: int
    mutability: Mutability
    dp_rank: int = 0


class BlockDescriptorList(Struct, frozen=True):
    """Blocks of one set of a worker, all of the same mutability.

    `lease`, `epoch`: the lease that allows others to use them; empty for own blocks.
    """

    worker_id: int
    block_set_idx: int
    mutability: Mutability
    block_indices: tuple[int, ...]
    lease: str = ""
    epoch: int = 0
    dp_rank: int = 0

    @property
    def rank(self) -> Rank:
        """The rank whose blocks they are."""
        return Rank(self.worker_id, self.dp_rank)

    def behind(self, blocks: int) -> "BlockDescriptorList | None":
        """Return the list without the first `blocks`; None if it has no more."""
        rest = self.block_indices[blocks:]
        return structs.replace(self, block_indices=rest) if rest else None

    def blocks(self) -> list[BlockDescriptor]:
        """Return the blocks one by one."""
        head = self.worker_id, self.block_set_idx
        tail = self.mutability, self.dp_rank
        return [BlockDescriptor(*head, index, *tail) for index in self.block_indices]


class PeerSource(Struct, frozen=True):
    """A rank of another worker, or of this one, that has the first `blocks` of a prompt.

    `addresses`: where it serves them, `tcp://host:port` or, on its host, `unix:///path`. `leased`:
    the first of them, which it keeps for us; None: it may have evicted any.
    """

    rank: Rank
    addresses: Sequence[str]
    blocks: int
    leased: BlockDescriptorList | None = None

    def behind(self, blocks: int) -> "PeerSource":
        """Return the source of the blocks behind the first `blocks`."""
        leased = None if self.leased is None else self.leased.behind(blocks)
        return PeerSource(self.rank, self.addresses, self.blocks - blocks, leased)
