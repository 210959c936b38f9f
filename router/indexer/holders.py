"""The holders of a radix tree: a rank in one life each, by the id that the tree's slots name.

take ─▶ staged ─▶ show ─▶ named ─▶ retire ─▶ unswept ─ sweep strips the slots ─▶ free
                            └ clear_tier ─▶ unswept, and named all the same
"""

from router.indexer import _sets
from router.indexer._memory import MAX_HOLDERS
from router.indexer._table import Words
from router.indexer.base import NOTHING_HELD, HeldSummary
from router.protocol.values import TIERS, PerTier, Rank, Tier

_ALL = 15
_COUNTS = slice(int(_sets.COUNTS), int(_sets.COUNTS) + TIERS)
_DIGESTS = slice(int(_sets.DIGESTS), int(_sets.DIGESTS) + TIERS)
_SUMMARY = slice(_COUNTS.start, _DIGESTS.stop)
_VISIBLE, _KEEP, _CLOSED = int(_sets.VISIBLE), int(_sets.KEEP), int(_sets.CLOSED)
_FORCED_OPEN, _LEFT_OVER = int(_sets.FORCED_OPEN), int(_sets.LEFT_OVER)


class Holders:
    """Owns the ids, and the `rows` in which kernels read and count what each holder has.

    `ids`: of the ranks that matching sees; `staged`: of blocks that will replace a rank's;
    `rank_of`: the rank of each id; `unswept`: ids with something left in slots that is not kept.
    """

    __slots__ = ("free", "ids", "next_id", "rank_of", "rows", "staged", "unswept")

    def __init__(self, rows: Words) -> None:
        self.rows = rows
        self.ids: dict[Rank, int] = {}
        self.staged: dict[Rank, int] = {}
        self.rank_of: list[Rank] = []
        self.next_id = 0
        self.free: list[int] = []
        self.unswept: set[int] = set()

    def take(self) -> int | None:
        """A holder id that nothing refers to, for blocks not yet visible; None: all are taken."""
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
        """The holder of what will replace all that the rank holds; None: there is no room."""
        holder = self.staged.get(rank)
        if holder is None:
            holder = self.take()
            if holder is not None:
                self.staged[rank] = holder
        return holder

    def drop_staged(self, rank: Rank) -> None:
        """Forget what was staged."""
        holder = self.staged.pop(rank, None)
        if holder is not None:
            self.retire(holder)

    def show(self, holder: int, rank: Rank) -> None:
        """From now on this is the rank's holder, and matching sees it."""
        self.ids[rank] = holder
        self.rows[holder, _VISIBLE] = _ALL
        self._name(holder, rank)

    def clear(self, rank: Rank, tier: Tier | None) -> None:
        """Note that the rank holds nothing in this tier; None: in any."""
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
        """Matching sees it no more; its id is used again once the slots are stripped of it."""
        row = self.rows[holder]
        row[_LEFT_OVER] += row[_COUNTS].sum()
        row[_SUMMARY] = row[_VISIBLE] = row[_KEEP] = row[_CLOSED] = 0
        if row[_LEFT_OVER]:
            self.unswept.add(holder)
        else:
            self.unswept.discard(holder)
            self.free.append(holder)

    def release_swept(self) -> None:
        """Slots were stripped: what has nothing left over there is whole again, or free."""
        for holder in [h for h in self.unswept if not self.rows[h, _LEFT_OVER]]:
            self.unswept.discard(holder)
            if self.rows[holder, _KEEP]:
                self.rows[holder, _VISIBLE] = self.rows[holder, _KEEP] = _ALL
            else:
                self.free.append(holder)

    def note_holes(self, rank: Rank, holes: PerTier | None) -> None:
        """Note in which cumulative tiers searches may jump; None: in none."""
        holder = self.ids.get(rank)
        if holder is None:
            return
        row = self.rows[holder]
        if holes is None or holder in self.unswept or row[_FORCED_OPEN]:
            row[_CLOSED] = 0
        else:
            row[_CLOSED] = _closed_mask(holes) if any(holes) else _ALL

    def summary(self, rank: Rank) -> HeldSummary:
        """Count and digest of what the rank holds. O(1)."""
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
        """Earlier answers keep the list of names of their search, so no name in it is changed.

        A retired holder keeps its name until its id is used again: nobody sees it.
        """
        if holder >= len(self.rank_of):
            self.rank_of += [rank] * (holder + 1 - len(self.rank_of))
        elif self.rank_of[holder] != rank:
            self.rank_of = [*self.rank_of]
            self.rank_of[holder] = rank


def _closed_mask(holes: PerTier) -> int:
    return sum(1 << tier for tier, count in enumerate(holes) if not count)
