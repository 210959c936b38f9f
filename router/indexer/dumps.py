"""What an index held: read in slices, so that nobody waits, and sorted out afterwards.

Blocks that come or go while the slices are read may be missing or too many; `event_ids` and states
are as of the first slice. Events are absolute, so whoever applies those that followed then has it
exactly; whoever does not, has what was held at some moments between two.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Annotated

from msgspec import Meta, Struct

from router.indexer.base import HeldSlice
from router.indexer.grouping import blocks_by_rank
from router.protocol.events import STATE_WORDS, unpack_state
from router.protocol.values import HashArray, HeldState, Identity, Rank, Scope, Tier

_STATE_BYTES = 8 * STATE_WORDS


class RankBlocks(Struct, frozen=True):
    """Blocks of one rank in one tier, and the event as of which it held them."""

    rank: Rank
    tier: Tier
    event_id: int
    sequence_hashes: HashArray


class RankState(Struct, frozen=True, array_like=True):
    """Where a rank stands: the life, event and sums that its part of the index shows."""

    scope: Scope
    rank: Rank
    identity: Identity
    incarnation: int
    event_id: int
    packed_state: Annotated[bytes, Meta(min_length=_STATE_BYTES, max_length=_STATE_BYTES)]

    @property
    def held(self) -> HeldState:
        """What the rank said it holds after that event."""
        return unpack_state(self.packed_state)


class IndexDump(Struct, frozen=True):
    """The slices of a dump, and the last event of each rank when it began."""

    event_ids: Mapping[Rank, int]
    slices: list[tuple[Scope, HeldSlice]]


def dumped_blocks(dump: IndexDump) -> Iterator[tuple[Scope, RankBlocks]]:
    """Everything held, by scope, rank and tier. May run on another thread. O(blocks held)."""
    for scope, of_scope in groupby(dump.slices, key=itemgetter(0)):
        for held in blocks_by_rank(part for _, part in of_scope):
            event_id = dump.event_ids.get(held.rank, 0)
            yield scope, RankBlocks(held.rank, held.tier, event_id, held.sequence_hashes)
