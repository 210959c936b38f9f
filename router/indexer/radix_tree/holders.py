"""The holders of a radix tree: each is one incarnation of a rank, named in the tree's slots by id.

take ─▶ staged ─▶ show ─▶ named ─▶ retire ─▶ unswept ─ sweep strips the slots ─▶ free
                            └ clear_tier ─▶ unswept, but still named
"""

from router.indexer.base import NOTHING_HELD, HeldSummary
from router.indexer.radix_tree import _holder_sets
from router.indexer.radix_tree._block_table import Words
from router.indexer.radix_tree._memory import MAX_HOLDERS
from router.protocol.values import TIERS, PerTier, Rank, Tier

_ALL = 15
_COUNTS = slice(int(_holder_sets.COUNTS), int(_holder_sets.COUNTS) + TIERS)
_DIGESTS = slice(int(_holder_sets.DIGESTS), int(_holder_sets.DIGESTS) + TIERS)
_SUMMARY = slice(_COUNTS.start, _DIGESTS.stop)
_VISIBLE, _KEEP, _CLOSED = (
    int(_holder_sets.VISIBLE),
    int(_holder_sets.KEEP),
    int(_holder_sets.CLOSED),
)
_FORCED_OPEN, _LEFT_OVER = int(_holder_sets.FORCED_OPEN), int(_holder_sets.LEFT_OVER)


class Holders:
    """Owner of the ids, and of the `rows` in which kernels read and count each holder's state.

    `ids`: holders of the ranks that matching sees; `staged`: holders of blocks that will replace a
    rank's; `rank_of`: the rank of each id; `version` counts its changes; `unswept`: ids that
    slots still name in tiers that the holder does not keep.
    """

    __slots__ = ("free", "ids", "next_id", "rank_of", "rows", "staged", "unswept", "version")

    def __init__(self, rows: Words) -> None:
        self.rows = rows
        self.ids: dict[Rank, int] = {}
        self.staged: dict[Rank, int] = {}
        self.rank_of: list[Rank] = []
        self.version = 0
        self.next_id = 0
        self.free: list[int] = []
        self.unswept: set[int] = set()

    def take(self) -> int | None:
        """Return an unused holder id, not yet visible. Returns None if all ids are taken."""
        if self.free:
            holder = self.free.pop()
        elif self.next_id < MAX_HOLDERS:
            holder, self.next_id = self.next_id, self.next_id + 1
        else:
            return None
        self.rows[holder] = 0
        self.rows[holder, _KEEP] = _ALL
        return holder

    def stage(self, rank: Rank) -> int | None:
        """Return the holder of a rank's staged blocks. Returns None if there is no room."""
        holder = self.staged.get(rank)
        if holder is None:
            holder = self.take()
            if holder is not None:
                self.staged[rank] = holder
        return holder

    def drop_staged(self, rank: Rank) -> None:
        """Drop the staged blocks."""
        holder = self.staged.pop(rank, None)
        if holder is not None:
            self.retire(holder)

    def show(self, holder: int, rank: Rank) -> None:
        """Make this the rank's holder, visible to matching."""
        self.ids[rank] = holder
        self.rows[holder, _VISIBLE] = _ALL
        self._name(holder, rank)

    def clear(self, rank: Rank, tier: Tier | None) -> None:
        """Remove all blocks of the rank from this tier; None: from all tiers."""
        holder = self.ids.get(rank)
        if holder is None:
            return
        row = self.rows[holder]
        cleared = int(row[_COUNTS.start + tier]) if tier is not None else 0
        if tier is None or cleared == int(row[_COUNTS].sum()):
            del self.ids[rank]
            self.retire(holder)
        elif cleared:
            self._clear_tier(holder, tier, cleared)

    def retire(self, holder: int) -> None:
        """Hide a holder from matching; its id is reused once no slot names it."""
        row = self.rows[holder]
        row[_LEFT_OVER] += row[_COUNTS].sum()
        row[_SUMMARY] = row[_VISIBLE] = row[_KEEP] = row[_CLOSED] = 0
        if row[_LEFT_OVER]:
            self.unswept.add(holder)
        else:
            self.unswept.discard(holder)
            self.free.append(holder)

    def release_swept(self) -> None:
        """Restore, or free, each holder without unkept blocks in the slots, after a sweep."""
        for holder in [h for h in self.unswept if not self.rows[h, _LEFT_OVER]]:
            self.unswept.discard(holder)
            if self.rows[holder, _KEEP]:
                self.rows[holder, _VISIBLE] = self.rows[holder, _KEEP] = _ALL
            else:
                self.free.append(holder)

    def note_holes(self, rank: Rank, holes: PerTier | None) -> None:
        """Record in which cumulative tiers searches may jump; None: in none."""
        holder = self.ids.get(rank)
        if holder is None:
            return
        row = self.rows[holder]
        if holes is None or holder in self.unswept or row[_FORCED_OPEN]:
            row[_CLOSED] = 0
        else:
            row[_CLOSED] = _closed_mask(holes) if any(holes) else _ALL

    def summary(self, rank: Rank) -> HeldSummary:
        """Return the number and digest of the rank's blocks. O(1)."""
        holder = self.ids.get(rank)
        if holder is None:
            return NOTHING_HELD
        row = self.rows[holder, _SUMMARY].tolist()
        return HeldSummary(tuple(row[:TIERS]), tuple(row[TIERS:]))

    def _clear_tier(self, holder: int, tier: Tier, cleared: int) -> None:
        row = self.rows[holder]
        row[_VISIBLE] = row[_KEEP] = int(row[_KEEP]) & ~(1 << tier)
        row[_COUNTS.start + tier] = row[_DIGESTS.start + tier] = row[_CLOSED] = 0
        row[_LEFT_OVER] += cleared
        self.unswept.add(holder)

    def _name(self, holder: int, rank: Rank) -> None:
        """Set the rank of a holder id. Copies the list: earlier results still refer to the old one.

        A retired holder keeps its rank until the id is reused: matching does not see it.
        """
        self.version += 1
        if holder >= len(self.rank_of):
            self.rank_of += [rank] * (holder + 1 - len(self.rank_of))
        elif self.rank_of[holder] != rank:
            self.rank_of = [*self.rank_of]
            self.rank_of[holder] = rank


def _closed_mask(holes: PerTier) -> int:
    return sum(1 << tier for tier, count in enumerate(holes) if not count)
