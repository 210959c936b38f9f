"""Long messages, applied in slices: between two of them, others get their turn.

Each generator pauses when about `SLICE_BLOCKS` are applied, and returns the outcome.
"""

from collections.abc import Generator, Iterable

from router.indexer.base import DONE, REFUSED, HeldSummary, Indexer
from router.protocol.events import EventBatch, TierBlocks
from router.protocol.values import HeldState, Rank, unpack_hashes

SLICE_BLOCKS = 512
"""Blocks applied without a pause: about 30 µs."""


def apply_rest(
    indexer: Indexer, rank: Rank, batch: EventBatch, progress: int
) -> Generator[None, None, int]:
    """Apply the rest of a batch, of which a slice was applied before."""
    while progress >= 0:
        yield
        progress = indexer.apply(rank, batch, progress, SLICE_BLOCKS)
    return progress


def replace_all(
    indexer: Indexer, rank: Rank, blocks: Iterable[TierBlocks], state: HeldState
) -> Generator[None, None, int]:
    """Replace all that a rank holds; what it held before is visible up to the last slice."""
    is_kept, room = True, SLICE_BLOCKS
    indexer.drop_staged(rank)
    for each in blocks:
        hashes = unpack_hashes(each.sequence_hashes)
        while len(hashes):
            if not room:
                yield
                room = SLICE_BLOCKS
            is_kept &= indexer.stage(rank, each.tier, hashes[:room])
            hashes, room = hashes[room:], room - len(hashes[:room])
    indexer.commit_staged(rank)
    indexer.note_holes(rank, state.holes)
    indexer.check(rank, HeldSummary(state.counts, state.digests))
    return DONE if is_kept else REFUSED
