"""Dumps of an index: read in slices, so that requests do not wait, and grouped afterwards.

Blocks added or removed while the slices are read may be missing or superfluous; `event_ids` and
states are as of the first slice. Events are absolute: applying those that followed gives the exact
contents; without them, a dump mixes contents of several moments.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from router.indexer.base import ExportedBlocks, HeldSlice
from router.indexer.radix_tree.matches import blocks_by_rank
from router.protocol.events import STATE_WORDS, unpack_state
from router.protocol.hybrid import HybridState
from router.protocol.values import HashArray, HeldState, Identity, Rank, Scope, Tier

_STATE_BYTES = 8 * STATE_WORDS


class RankBlocks(Struct, frozen=True):
    """Blocks of one rank in one tier, and the last event applied when the dump began."""

    rank: Rank
    tier: Tier
    event_id: int
    sequence_hashes: HashArray


class RankState(Struct, frozen=True, array_like=True):
    """State of a rank: the incarnation, event and sums that its part of the index shows.

    `hybrid`: the layout and sums of a hybrid rank; None for others.
    """

    scope: Scope
    rank: Rank
    identity: Identity
    incarnation: int
    event_id: int
    packed_state: Annotated[bytes, Meta(min_length=_STATE_BYTES, max_length=_STATE_BYTES)]
    hybrid: HybridState | None = None

    @property
    def held(self) -> HeldState:
        """The state that the rank reported with that event."""
        return unpack_state(self.packed_state)


ScopeSlices: TypeAlias = Sequence[tuple[Scope, HeldSlice]]
"""Slices of all scopes, each scope's together."""


class IndexDump(Struct, frozen=True):
    """The slices of a dump, and the last event of each rank when it began."""

    event_ids: Mapping[Rank, int]
    slices: ScopeSlices


def dumped_blocks(dump: IndexDump) -> Iterator[tuple[Scope, RankBlocks]]:
    """Yield all held blocks, by scope, rank and tier; on any thread. O(blocks held)."""
    for scope, held in blocks_by_scope(dump.slices):
        event_id = dump.event_ids.get(held.rank, 0)
        yield scope, RankBlocks(held.rank, held.tier, event_id, held.sequence_hashes)


def blocks_by_scope(slices: ScopeSlices) -> Iterator[tuple[Scope, ExportedBlocks]]:
    """Yield the blocks of slices, by scope, rank and tier; on any thread. O(blocks)."""
    for scope, of_scope in groupby(slices, key=itemgetter(0)):
        for held in blocks_by_rank(part for _, part in of_scope):
            yield scope, held
