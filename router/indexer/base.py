"""The interface of an index of held blocks, independent of its storage."""

import enum
from collections.abc import ItemsView, Iterator, Mapping
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.errors import KvRouterError
from router.protocol.events import EventBatch
from router.protocol.hybrid import MAX_CLASSES, HybridState, Layout
from router.protocol.values import TIERS, HashArray, HeldState, PerTier, Rank, Tier

DEFAULT_MAX_BLOCKS = 1 << 25
"""Limit of the blocks in an index, unless it is set."""


class Overlap(Struct, frozen=True, array_like=True):
    """Leading blocks of a prompt that a rank holds; cumulative: `disk` is device, host or disk."""

    device: int
    host: int
    disk: int
    remote: int


NO_OVERLAP = Overlap(0, 0, 0, 0)


class OverlapScores(Protocol):
    """Ranks that hold at least the first block of the prompt in some tier. A `dict` conforms."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Rank]: ...

    def __getitem__(self, rank: Rank, /) -> Overlap: ...

    def get(self, rank: Rank, default: Overlap, /) -> Overlap:
        """Return the rank's overlap, or the default."""

    def items(self) -> ItemsView[Rank, Overlap]:
        """Return the ranks and their overlaps."""


class HeldSummary(Struct, frozen=True):
    """Number and digest of a rank's blocks, per tier; comparable with its agent's report.

    Of hybrid ranks, also per class: `MAX_CLASSES` of each; empty for others.
    """

    counts: PerTier
    digests: PerTier
    class_counts: tuple[int, ...] = ()
    class_digests: tuple[int, ...] = ()

    @classmethod
    def of(cls, state: HeldState, hybrid: HybridState | None) -> "HeldSummary":
        """Return the summary that an agent reports."""
        if hybrid is None:
            return cls(state.counts, state.digests)
        unused = (0,) * (MAX_CLASSES - len(hybrid.counts))
        return cls(state.counts, state.digests, hybrid.counts + unused, hybrid.digests + unused)


NOTHING_HELD = HeldSummary((0,) * TIERS, (0,) * TIERS)  # type: ignore[arg-type]


class ExportedBlocks(Struct, frozen=True):
    """Blocks of one rank in one tier, unordered."""

    rank: Rank
    tier: Tier
    sequence_hashes: HashArray


class HeldSlice(Struct, frozen=True):
    """A slice of the held blocks, not yet grouped by rank (`grouping.py`).

    `rows`: {holder id and tier mask, block}, of shape (rows, 2). `rank_of`: the ranks of these ids
    when the dump began, the same object in every slice of a tree.
    """

    rank_of: Mapping[int, Rank]
    rows: npt.NDArray[np.uint64]


DONE, DIFFERENT, REFUSED = -1, -2, -3
"""Outcomes of a batch. DONE: applied, and the index equals the rank's report. DIFFERENT: applied,
but the index differs from the report. REFUSED: the limit on blocks was reached, and some of the
batch's blocks are missing."""


class IndexMode(enum.StrEnum):
    """Source of the index: engines' events, the router's own decisions, or none."""

    EVENTS = "events"
    APPROXIMATE = "approximate"
    NONE = "none"


class IndexStats(Struct, frozen=True):
    """Size of an index, and results of its self-checks.

    `max_blocks`: 0 without a limit. `unswept_holders`: cleared ranks with blocks that are not
    freed yet. `differing_answers`: rows that differed when verified by walking. `class_blocks`: of
    hybrid ranks' classes, in a table of their own with the same limit.
    """

    blocks: int = 0
    max_blocks: int = 0
    class_blocks: int = 0
    holder_sets: int = 0
    unswept_holders: int = 0
    checked_answers: int = 0
    differing_answers: int = 0


class HolderRanks(Protocol):
    """The ranks of a tree's holders. `version` counts changes of `rank_of`."""

    rank_of: list[Rank]
    version: int


class SearchedTree(Struct, frozen=True, eq=False):
    """A radix tree for kernels: the address of its state, and the rank of each holder id."""

    address: int
    holders: HolderRanks


class Indexer(Protocol):
    """An exact index of the blocks of every rank; order and repetition of changes do not matter.

    Hash arguments are arrays of shape (blocks,) and are not mutated. A rank is created with its
    first block. If the limit on blocks is reached, `store`, `stage` and `remove` return False, and
    the change is applied in part.
    """

    def expect(self, ranks: int) -> None:
        """Prepare for growth to the blocks of `ranks` ranks in all; 0 ends the preparation.

        Only a hint: it saves growing in small steps, and is to be reset to 0 once they are read.
        """

    def store(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Record that the rank holds these blocks in this tier. O(blocks named)."""

    def remove(self, rank: Rank, tier: Tier, sequence_hashes: HashArray) -> bool:
        """Remove these blocks of the rank from this tier; blocks it does not hold are ignored."""

    def clear(self, rank: Rank, tier: Tier | None = None) -> None:
        """Remove all blocks of the rank from this tier; None: all that it holds, and its layout.

        O(1), swept later.
        """

    def apply(self, rank: Rank, batch: EventBatch, progress: int, room_blocks: int) -> int:
        """Apply about `room_blocks` blocks of a batch's events from `progress` (0 at first) on.

        Returns DONE, DIFFERENT, REFUSED, or the progress to continue from; a difference may appear
        later, in `take_differing`. With the last event the holes are recorded. The rank's layout is
        the batch's from now on. Raises WireError if the events are malformed; then no blocks were
        changed. O(blocks applied).
        """

    def stage(self, rank: Rank, place: int, sequence_hashes: HashArray) -> bool:
        """Collect blocks that will replace all that the rank holds; not visible yet.

        `place`: their tier, or the number of tiers plus their class.
        """

    def commit_staged(self, rank: Rank, layout: Layout | None = None) -> None:
        """Replace all that the rank holds by the staged blocks. O(1).

        `layout`: that of a hybrid rank; None for others, and the blocks of classes are dropped.
        """

    def drop_staged(self, rank: Rank) -> None:
        """Drop the staged blocks. O(1)."""

    def note_holes(self, rank: Rank, holes: PerTier | None) -> None:
        """Record how many held blocks lack a held parent, per cumulative tier; None: unknown.

        If there are none, membership along every prompt is monotone, and searches may jump. The
        number is unknown until recorded, and again after every change to the rank.
        """

    def check(self, rank: Rank, expected: HeldSummary) -> None:
        """Compare what the rank holds now with this; the result appears in `take_differing`."""

    def take_differing(self) -> list[Rank]:
        """Return, and clear, the ranks that checks found to differ since the last call."""

    @property
    def trees(self) -> tuple[SearchedTree, ...]:
        """The trees that `find_matches` searches, with all changes applied; each is one object."""

    def find_matches(self, sequence_hashes: HashArray) -> OverlapScores:
        """Return the longest held prefix of a prompt, per rank and cumulative tier."""

    def resumable(
        self, sequence_hashes: HashArray, isl_tokens: int, block_size: int
    ) -> OverlapScores:
        """Return the prefix of a prompt that ranks need not compute again, in blocks.

        Of hybrid ranks: the longest one that full attention holds and that all classes let it
        resume (`router.protocol.hybrid`), in all tiers alike. Of the others: their overlap.
        """

    def summary(self, rank: Rank) -> HeldSummary:
        """Return the number and digest of the rank's blocks. O(1)."""

    def dump(self) -> Iterator[ExportedBlocks]:
        """Yield all held blocks, by rank and tier, without empty entries. O(blocks held).

        Of hybrid ranks: the blocks of full attention.
        """

    def dump_slices(self) -> Iterator[HeldSlice]:
        """Yield the blocks of `dump` in slices of about 10,000 rows; all may change in between.

        A block held throughout is in one slice; one that is added or removed meanwhile may be in
        none. Ids belong to ranks as of the first slice: a rank that is cleared or replaced
        meanwhile may show blocks that belong to another rank by then.
        """

    def dump_class_slices(self) -> Iterator[HeldSlice]:
        """Yield the blocks of hybrid ranks' classes like `dump_slices`, class c as tier c."""

    def stats(self) -> IndexStats:
        """Return the size of the index and the results of its checks. O(1)."""

    def sweep(self, sub_tables: int) -> bool:
        """Free a slice of the blocks of cleared ranks. Returns False once nothing is left."""

    def close(self) -> None:
        """Release threads and other resources than memory; the index is unusable afterwards."""


SnapshotProblem: TypeAlias = Literal[
    "foreign", "version", "damaged", "malformed", "torn", "too large", "other stream", "slow"
]


class SnapshotError(KvRouterError):
    """A snapshot of an index that cannot be used; `problem` names the reason."""

    code = "snapshot"

    def __init__(self, problem: SnapshotProblem, detail: str) -> None:
        super().__init__(f"unusable snapshot ({problem}): {detail}")
        self.problem = problem
        self.detail = detail
