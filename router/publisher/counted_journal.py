"""A journal that knows when several of an engine's blocks have one name.

Two groups of full attention each report a block of their own, with the same tokens behind the same
prefix. The journal keeps sets, so here is counted how many more there are: the name is given up
with the last of them.
"""

from collections import Counter

import numpy as np

from router.protocol.values import HashArray, Tier
from router.publisher.source_journal import SourceJournal


class CountedJournal:
    """A journal, and for each tier and name held by several engine blocks, how many more than one.

    It is told public hashes; it counts, and tells the journal, their bus names.

    Invariant: every name counted is held in its tier.
    """

    __slots__ = ("_journal", "_more")

    def __init__(self, journal: SourceJournal) -> None:
        self._journal = journal
        self._more: dict[tuple[int, int], int] = {}

    def stored(
        self, tier: Tier, hashes: HashArray, heads: HashArray, firsts: HashArray | None
    ) -> None:
        """Paths of blocks (`held.path_heads`) are in a tier. `firsts`: once for each engine block
        that was not there before, its name; None: nothing is counted.
        """
        if firsts is not None and not len(firsts):
            return
        naming = self._journal.naming
        changed = self._journal.stored_paths(tier, naming.names(hashes), naming.heads(heads))
        if firsts is not None and len(changed) != len(firsts):
            self._count(tier, naming.names(firsts), changed)

    def removed(self, tier: Tier, hashes: HashArray) -> None:
        """An engine block of each name is no longer in a tier."""
        hashes = self._journal.naming.names(hashes)
        if self._more:
            hashes = np.array([h for h in hashes.tolist() if self._is_last(tier, h)], np.uint64)
        if len(hashes):
            self._journal.removed(tier, hashes)

    def cleared(self, tier: Tier) -> None:
        """A tier is empty."""
        self._more = {key: count for key, count in self._more.items() if key[0] != tier}
        self._journal.cleared(tier)

    def listed(self) -> list[tuple[int, int, int]]:
        """Tier, name and count of what is held more than once."""
        return [(tier, name, count) for (tier, name), count in self._more.items()]

    def load(self, listed: list[tuple[int, int, int]]) -> None:
        """Replace all counts by what was listed."""
        self._more = {(tier, name): count for tier, name, count in listed}

    def check_invariants(self, held: dict[Tier, Counter[int]]) -> None:
        """Assert that these, and no more, are held and counted. O(blocks held)."""
        name = self._journal.naming.name
        held = {t: Counter({name(h): n for h, n in c.items()}) for t, c in held.items()}
        for tier, counts in held.items():
            assert set(self._journal.held(tier).tolist()) == set(counts)
            more = {name: n for (t, name), n in self._more.items() if t == tier}
            assert more == {name: count - 1 for name, count in counts.items() if count > 1}

    def _count(self, tier: Tier, firsts: HashArray, changed: HashArray) -> None:
        known = Counter(firsts.tolist()) - Counter(changed.tolist())
        for name, count in known.items():
            self._more[tier, name] = self._more.get((tier, name), 0) + count

    def _is_last(self, tier: Tier, name: int) -> bool:
        more = self._more.get((tier, name), 0)
        if more > 1:
            self._more[tier, name] = more - 1
        elif more:
            del self._more[tier, name]
        return not more
