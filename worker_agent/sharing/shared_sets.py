"""Sets of blocks that other workers may read, and the blocks of a request among them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from worker_agent.blocks.pool import BlockPool
from worker_agent.transfer.block_window import BlockWindow


def no_proof(_block: int, _identity: bytes) -> int | None:
    """Return None: no checksum is recorded."""
    return None


class SharedSet(Struct, frozen=True):
    """Blocks that other workers may read: their pool, shared by threads, and their bytes.

    `path`: the file that backs the memory, or None. A process on this host that knows the token may
    map it for reading. `proof`: returns the checksum that was recorded when the block was stored
    under an identity, or None.
    """

    pool: BlockPool
    window: BlockWindow
    path: Path | None = None
    proof: Callable[[int, bytes], int | None] = no_proof

    @property
    def can_be_mapped(self) -> bool:
        """True if a file backs the memory and every block is contiguous."""
        return self.path is not None and self.window.is_in_one_piece


class Part(Struct, frozen=True):
    """Blocks of one set to be sent, and their places in the request.

    `proofs`: the checksum of each block, or None if it is not known.
    """

    set_idx: int
    shared: SharedSet
    places: Sequence[int]
    blocks: Sequence[int]
    proofs: Sequence[int | None]


def held_by_name(
    identities: Sequence[bytes], sets: Mapping[int, SharedSet], held: ExitStack
) -> tuple[list[Part], list[int]]:
    """Find blocks by identity, each in the first set that has it, and hold them until `held` ends.

    Returns the blocks by set, and the places that no set has.
    """
    parts: list[Part] = []
    left = list(range(len(identities)))
    for index, shared in sets.items():
        blocks = shared.pool.hold([identities[place] for place in left])
        found = [(p, block) for p, block in zip(left, blocks, strict=True) if block is not None]
        left = [place for place, block in zip(left, blocks, strict=True) if block is None]
        if found:
            at, blocks_there = [each[0] for each in found], [each[1] for each in found]
            held.callback(shared.pool.release, blocks_there)
            proofs = [shared.proof(block, identities[place]) for place, block in found]
            parts.append(Part(index, shared, at, blocks_there, proofs))
    return parts, left
