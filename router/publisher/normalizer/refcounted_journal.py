"""A journal that counts how many of an engine's blocks have the same sequence hash.

Two groups of full attention each report a block of their own, with the same tokens after the same
prefix. The journal keeps sets, so the surplus is counted here: a hash is removed together with the
last of its blocks.
"""

from collections import Counter

import numpy as np

from router.protocol.values import HashArray, Tier
from router.publisher.journal.consolidator import SourceJournal


class RefcountedJournal:
    """A journal, and for each tier and hash held by several engine blocks, the count minus one.

    Its arguments are public hashes; it counts, and passes on to the journal, their bus names.

    Invariant: every name counted is held in its tier.
    """

    __slots__ = ("_journal", "_more")

    def __init__(self, journal: SourceJournal) -> None:
        self._journal = journal
        self._more: dict[tuple[int, int], int] = {}

    def stored(
        self, tier: Tier, hashes: HashArray, heads: HashArray, firsts: HashArray | None
    ) -> None:
        """Store paths of blocks (`held.path_heads`) in a tier.

        `firsts`: the hash of each engine block that was not there before, repeated for blocks with
        the same hash; None: nothing is counted.
        """
        if firsts is not None and not len(firsts):
            return
        naming = self._journal.naming
        changed = self._journal.stored_paths(tier, naming.names(hashes), naming.heads(heads))
        if firsts is not None and len(changed) != len(firsts):
            self._count(tier, naming.names(firsts), changed)

    def removed(self, tier: Tier, hashes: HashArray) -> None:
        """Remove one engine block of each hash from a tier."""
        hashes = self._journal.naming.names(hashes)
        if self._more:
            hashes = np.array([h for h in hashes.tolist() if self._is_last(tier, h)], np.uint64)
        if len(hashes):
            self._journal.removed(tier, hashes)

    def cleared(self, tier: Tier) -> None:
        """Remove everything from a tier."""
        self._more = {key: count for key, count in self._more.items() if key[0] != tier}
        self._journal.cleared(tier)

    def listed(self) -> list[tuple[int, int, int]]:
        """Return tier, name and surplus count of everything that is held more than once."""
        return [(tier, name, count) for (tier, name), count in self._more.items()]

    def load(self, listed: list[tuple[int, int, int]]) -> None:
        """Replace all counts by a list."""
        self._more = {(tier, name): count for tier, name, count in listed}

    def check_invariants(self, held: dict[Tier, Counter[int]]) -> None:
        """Assert that exactly these blocks are held and counted. O(blocks held)."""
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
