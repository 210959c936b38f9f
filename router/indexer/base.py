"""What an index of held blocks is asked and told, free of how it keeps them."""

import enum
from collections.abc import ItemsView, Iterator, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.events import EventBatch
from router.protocol.values import TIERS, HashArray, PerTier, Rank, Tier


class Overlap(Struct, frozen=True, array_like=True):
    """Leading blocks of a prompt that a rank holds; cumulative: `disk` is device, host or disk."""

    device: int
    host: int
    disk: int
    remote: int


NO_OVERLAP = Overlap(0, 0, 0, 0)


class OverlapScores(Protocol):
    """Ranks that hold at least the first block of the prompt in some tier; a `dict` will do."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Rank]: ...

    def __getitem__(self, rank: Rank, /) -> Overlap: ...

    def get(self, rank: Rank, default: Overlap, /) -> Overlap:
        """The rank's overlap, or the default."""

    def items(self) -> ItemsView[Rank, Overlap]:
        """Ranks and their overlaps."""


class HeldSummary(Struct, frozen=True):
    """Size and digest of what a rank holds, per tier; comparable with its agent's `HeldState`."""

    counts: PerTier
    digests: PerTier


NOTHING_HELD = HeldSummary((0,) * TIERS, (0,) * TIERS)  # type: ignore[arg-type]


class HeldBlocks(Struct, frozen=True):
    """Blocks of one rank in one tier, in no order."""

    rank: Rank
    tier: Tier
    sequence_hashes: HashArray


class HeldSlice(Struct, frozen=True):
    """A slice of what is held, not sorted out yet (`grouping.py`).

    `rows`: {holder id and tier mask, block}, of shape (rows, 2). `rank_of`: whose ids these were
    when the dump began, the same object in every slice of a tree.
    """

    rank_of: Mapping[int, Rank]
    rows: npt.NDArray[np.uint64]


DONE, DIFFERENT, REFUSED = -1, -2, -3
"""Of a batch: applied, and the index shows what the rank says it holds, or something else; or the
limit on blocks was reached, and some of what it names is missing."""


class IndexMode(enum.StrEnum):
    """Where the knowledge of caches comes from: engines' events, our own decisions, or nowhere."""

    EVENTS = "events"
    APPROXIMATE = "approximate"
    NONE = "none"


class IndexStats(Struct, frozen=True):
    """How full an index is, and how its checks of its own answers ended.

    `max_blocks`: 0 where there is no limit. `unswept_holders`: cleared ranks whose blocks are not
    freed yet. `differing_answers`: rows that a check by walking found to differ.
    """

    blocks: int = 0
    max_blocks: int = 0
    holder_sets: int = 0
    unswept_holders: int = 0
    checked_answers: int = 0
    differing_answers: int = 0


class Indexer(Protocol):
    """Which blocks does every rank hold? Exact: neither order nor repetition of changes matters.

    Hash arguments are arrays of shape (blocks,) and are not mutated. Ranks come into being with
    their first block. Where the limit on blocks is reached, `store`, `stage` and `remove` answer
    False, and what they name is done in part.
    """

    def expect(self, ranks: int) -> None:
        """Make room, as blocks come, for what so many ranks will hold in all; 0: nobody knows.

        Only a hint: it saves growing step by step, and is to be withdrawn when they are read.
        """

    def store(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Note that the rank holds these blocks in this tier. O(blocks named)."""

    def remove(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Note that it no longer does; blocks it does not hold there are passed over."""

    def clear(self, rank: Rank, tier: Tier | None = None) -> None:
        """Note that the rank holds nothing in this tier; None: in any. O(1), swept later."""

    def apply(self, rank: Rank, batch: EventBatch, progress: int, room_blocks: int) -> int:
        """Apply a batch's events from a progress on, 0 at first, for about so many blocks.

        Returns DONE, DIFFERENT, REFUSED, or the progress to go on from; a difference may show late,
        in `take_differing`. With the last event the holes are noted. Raises WireError for malformed
        events; nothing was changed then. O(blocks applied).
        """

    def stage(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Collect blocks that will replace all that the rank holds; not visible yet."""

    def commit_staged(self, rank: Rank) -> None:
        """What was staged is now what the rank holds, and nothing else. O(1)."""

    def drop_staged(self, rank: Rank) -> None:
        """Forget what was staged. O(1)."""

    def note_holes(self, rank: Rank, holes: PerTier | None) -> None:
        """Note how many held blocks lack a held parent, per cumulative tier; None: unknown.

        Where there are none, membership along every prompt is monotone, and searches may jump.
        Unknown until noted, and again after every change to the rank.
        """

    def check(self, rank: Rank, expected: HeldSummary) -> None:
        """Compare what the rank holds now with this; the outcome is in `take_differing`."""

    def take_differing(self) -> list[Rank]:
        """Ranks that a check found to differ since the last call."""

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """The longest held prefix of a prompt, per rank and cumulative tier."""

    def summary(self, rank: Rank) -> HeldSummary:
        """Count and digest of what the rank holds. O(1)."""

    def dump(self) -> Iterator[HeldBlocks]:
        """Everything held, by rank and tier, without empty entries. O(blocks held)."""

    def dump_slices(self) -> Iterator[HeldSlice]:
        """Everything held in slices of some 10,000 rows, between which the index may change.

        A block held all the while is in one slice; one that comes or goes meanwhile may be in none.
        Whose blocks they are is as of the first slice: a rank that is cleared or replaced meanwhile
        may show what is another's by then.
        """

    def block_count(self) -> int:
        """Distinct blocks kept, those of cleared ranks included until they are swept. O(1)."""

    def stats(self) -> IndexStats:
        """How full the index is, and how its checks ended. O(1)."""

    def sweep(self, sub_tables: int) -> bool:
        """Free a slice of what cleared ranks left behind; False once nothing is left to do."""

    def close(self) -> None:
        """Let go of what is not memory; nothing may be asked or told afterwards."""
