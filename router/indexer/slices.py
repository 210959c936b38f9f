"""Long messages, applied in slices, so that other work may run in between.

Each generator pauses after about `SLICE_BLOCKS` blocks, or `slice_blocks` if it has that parameter,
and returns the outcome.
"""

from collections.abc import Generator, Iterable, Iterator
from typing import TypeAlias

from router.indexer.base import DONE, REFUSED, HeldSummary, Indexer
from router.protocol.events import Checkpoint, EventBatch
from router.protocol.values import HashArray, Rank

HeldBlocks: TypeAlias = Iterable[tuple[int, HashArray]]
"""Blocks, each time with their tier, or with the number of tiers plus their class."""

SLICE_BLOCKS = 512
"""Blocks applied without a pause: about 30 µs."""

FILL_SLICE_BLOCKS = 4096
"""Blocks applied without a pause while a new index is filled: about 0.4 ms. A process that is not
ready receives no requests, and heartbeats and sockets can wait that long."""


class Unfinished(dict[Rank, Iterator[None]]):
    """Messages and dumps applied in part: at most one per rank."""

    def apply_slice(self) -> bool:
        """Apply one more slice of the oldest entry. Returns False if there is none."""
        for rank, slices in self.items():
            if next(slices, self) is self:
                del self[rank]
            return True
        return False

    def finish(self, rank: Rank) -> None:
        """Apply slices until nothing of this rank is left."""
        while rank in self:
            self.apply_slice()


def apply_rest(
    indexer: Indexer, rank: Rank, batch: EventBatch, progress: int
) -> Generator[None, None, int]:
    """Apply the rest of a batch after its first slice."""
    while progress >= 0:
        yield
        progress = indexer.apply(rank, batch, progress, SLICE_BLOCKS)
    return progress


def replace_all(
    indexer: Indexer, checkpoint: Checkpoint, blocks: HeldBlocks, slice_blocks: int
) -> Generator[None, None, int]:
    """Replace all that a rank holds; its earlier blocks stay visible up to the last slice.

    `blocks`: those of all parts of the checkpoint.
    """
    rank, state, hybrid = checkpoint.rank, checkpoint.state, checkpoint.hybrid
    is_kept = yield from stage_all(indexer, rank, blocks, slice_blocks)
    indexer.commit_staged(rank, None if hybrid is None else hybrid.layout)
    indexer.note_holes(rank, state.holes)
    indexer.check(rank, HeldSummary.of(state, hybrid))
    return DONE if is_kept else REFUSED


def stage_all(
    indexer: Indexer, rank: Rank, blocks: HeldBlocks, slice_blocks: int
) -> Generator[None, None, bool]:
    """Stage all blocks that will replace a rank's. Returns False if some found no room."""
    is_kept, room = True, slice_blocks
    indexer.drop_staged(rank)
    for place, hashes in blocks:
        while len(hashes):
            if not room:
                yield
                room = slice_blocks
            is_kept &= indexer.stage(rank, place, hashes[:room])
            hashes, room = hashes[room:], room - len(hashes[:room])
    return is_kept
