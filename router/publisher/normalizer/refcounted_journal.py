"""A journal that counts how many of an engine's blocks have the same sequence hash.

The journal keeps sets. Within a group of layers, a hash is removed together with the last of its
blocks. If an engine has several groups of full attention, a hit needs the block in each of them:
a tier holds a hash while every group that stores blocks in this tier has a block of it.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from router.protocol.values import HashArray, Tier
from router.publisher.journal.consolidator import SourceJournal


class SavedCounts(Struct, frozen=True, array_like=True):
    """The groups of each tier, and what is counted, as in `RefcountedJournal`."""

    groups: dict[int, list[int]] = {}
    more: list[tuple[int, int, int]] = []
    by_group: list[tuple[int, int, dict[int, int]]] = []


class RefcountedJournal:
    """A journal, and the number of engine blocks of each hash where it is not one.

    `_groups`: the groups that have stored blocks in each tier. `_more`: in tiers of one group, for
    each hash of several blocks, their number minus one. `_by_group`: in the other tiers, for each
    hash the number of blocks of each group. Arguments are public hashes; it counts, and passes on
    to the journal, their bus names.

    Invariant: a tier holds the names in `_by_group` that have a block of each of its groups; with
    one group, it holds every name in `_more`.
    """

    __slots__ = ("_by_group", "_groups", "_journal", "_more")

    def __init__(self, journal: SourceJournal) -> None:
        self._journal = journal
        self._groups: dict[int, set[int]] = {tier: set() for tier in Tier}
        self._more: dict[tuple[int, int], int] = {}
        self._by_group: dict[tuple[int, int], dict[int, int]] = {}

    def stored(
        self, tier: Tier, hashes: HashArray, heads: HashArray, firsts: HashArray, group: int
    ) -> None:
        """Store paths of blocks (`held.path_heads`) of a group in a tier.

        `firsts`: the hash of each engine block that was not there before, repeated for blocks with
        the same hash.
        """
        groups = self._groups[tier]
        if group not in groups:
            self._add_group(tier, group)
        if not len(firsts):
            return
        naming = self._journal.naming
        names, heads = naming.names(hashes), naming.heads(heads)
        if len(groups) > 1:
            self._store_shared(tier, names, heads, naming.names(firsts), group)
            return
        changed = self._journal.stored_paths(tier, names, heads)
        if len(changed) != len(firsts):
            self._count(tier, naming.names(firsts), changed)

    def removed(self, tier: Tier, hashes: HashArray, group: int) -> None:
        """Remove one engine block of each hash of a group from a tier."""
        names = self._journal.naming.names(hashes)
        if len(self._groups[tier]) > 1:
            names = _array([h for h in names.tolist() if self._is_first_gone(tier, h, group)])
        elif self._more:
            names = _array([h for h in names.tolist() if self._is_last(tier, h)])
        if len(names):
            self._journal.removed(tier, names)

    def cleared(self, tier: Tier) -> None:
        """Remove everything from a tier."""
        self._more = {key: count for key, count in self._more.items() if key[0] != tier}
        self._by_group = {key: each for key, each in self._by_group.items() if key[0] != tier}
        self._journal.cleared(tier)

    def publish(self, tier: Tier, hashes: HashArray, heads: HashArray) -> None:
        """Publish paths that are counted already, as after `load`."""
        naming = self._journal.naming
        names, heads = naming.names(hashes), naming.heads(heads)
        if len(self._groups[tier]) > 1:
            names, heads = _selected(names, heads, self._complete(tier, set(names.tolist())))
        self._journal.stored_paths(tier, names, heads)

    def saved(self) -> SavedCounts:
        """Return what is counted, for `load`."""
        return SavedCounts(
            {tier: sorted(groups) for tier, groups in self._groups.items()},
            [(tier, name, count) for (tier, name), count in self._more.items()],
            [(tier, name, counts) for (tier, name), counts in self._by_group.items()],
        )

    def load(self, saved: SavedCounts) -> None:
        """Replace all counts; nothing is published."""
        self._groups = {tier: set(saved.groups.get(tier, ())) for tier in Tier}
        self._more = {(tier, name): count for tier, name, count in saved.more}
        self._by_group = {(tier, name): counts for tier, name, counts in saved.by_group}

    def check_invariants(self, held: dict[Tier, Counter[int]]) -> None:
        """Assert that exactly these blocks are held and counted. O(blocks held)."""
        name = self._journal.naming.name
        held = {t: Counter({name(h): n for h, n in c.items()}) for t, c in held.items()}
        for tier, counts in held.items():
            here = set(self._journal.held(tier).tolist())
            if len(self._groups[tier]) > 1:
                by_group = {n: each for (t, n), each in self._by_group.items() if t == tier}
                assert set(by_group) == set(counts)
                assert all(sum(each.values()) == counts[n] for n, each in by_group.items())
                assert here == self._complete(tier, set(counts))
                continue
            assert here == set(counts)
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

    def _add_group(self, tier: Tier, group: int) -> None:
        """Count by group from the second one on; blocks of the former ones alone are withdrawn."""
        former = list(self._groups[tier])
        self._groups[tier].add(group)
        if not former:
            return
        names = self._journal.held(tier)
        if len(former) == 1:
            for name in names.tolist():
                count = 1 + self._more.pop((tier, name), 0)
                self._by_group[tier, name] = {former[0]: count}
        if len(names):
            self._journal.removed(tier, names)

    def _store_shared(
        self, tier: Tier, names: HashArray, heads: HashArray, firsts: HashArray, group: int
    ) -> None:
        for name in firsts.tolist():
            counts = self._by_group.setdefault((tier, name), {})
            counts[group] = counts.get(group, 0) + 1
        names, heads = _selected(names, heads, self._complete(tier, set(firsts.tolist())))
        if len(names):
            self._journal.stored_paths(tier, names, heads)

    def _complete(self, tier: Tier, names: set[int]) -> set[int]:
        """Return those of the names that have a block of each group."""
        count = len(self._groups[tier])
        return {name for name in names if len(self._by_group.get((tier, name), ())) == count}

    def _is_first_gone(self, tier: Tier, name: int, group: int) -> bool:
        """Remove one block. Returns whether every group had one before, and this one has none."""
        counts = self._by_group[tier, name]
        was_complete = len(counts) == len(self._groups[tier])
        counts[group] -= 1
        if not counts[group]:
            del counts[group]
            if not counts:
                del self._by_group[tier, name]
            return was_complete
        return False


def _selected(names: HashArray, heads: HashArray, wanted: set[int]) -> tuple[HashArray, HashArray]:
    """Return those of the names of paths that are wanted, each with a head of its own."""
    parents: dict[int, Sequence[int]] = {
        first: (parent, has_parent) for first, parent, has_parent in heads.reshape(-1, 3).tolist()
    }
    listed: list[int] = names.tolist()
    rows: list[int] = []
    kept = [place for place, name in enumerate(listed) if name in wanted]
    for row, place in enumerate(kept):
        parent, has_parent = parents.get(place, (listed[place - 1], 1))
        rows += (row, parent, has_parent)
    return names[kept], _array(rows)


def _array(words: list[int]) -> HashArray:
    return np.array(words, np.uint64)
