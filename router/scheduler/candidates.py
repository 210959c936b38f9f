"""The ranks that may be chosen, arranged for decisions."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import Identity, Rank
from router.sequence.rank_table import RankTable

Positions = npt.NDArray[np.int64]


class Candidates(Struct, frozen=True, eq=False):
    """Ranks in order, each with its worker and its slot in the rank table.

    `groups`: for each identity that prompts are hashed under, rows {position, slot} of its
    candidates.
    `identities`: those identities. `have_prefill`: True if some candidates only compute prompts for
    others.
    """

    ranks: Sequence[Rank]
    workers: Sequence[WorkerAnnouncement]
    slots: Positions
    groups: Sequence[tuple[Identity, Positions]]
    identities: Sequence[Identity]
    have_prefill: bool

    def __len__(self) -> int:
        return len(self.ranks)

    def worker_of(self, rank: Rank) -> WorkerAnnouncement:
        """Return the worker of a candidate; ranks are in order. O(log candidates)."""
        return self.workers[bisect_left(self.ranks, rank)]

    def __contains__(self, rank: Rank) -> bool:
        """Return whether the rank is a candidate. O(log candidates)."""
        position = bisect_left(self.ranks, rank)
        return position < len(self.ranks) and self.ranks[position] == rank

    @classmethod
    def of(cls, workers: Iterable[WorkerAnnouncement], table: RankTable) -> "Candidates":
        """Return every rank of these workers as a candidate. O(ranks)."""
        pairs = list(chain.from_iterable(((rank, w) for rank in w.ranks) for w in workers))
        return _laid_out(pairs, np.array([table.slot(rank) for rank, _ in pairs], np.int64))


class Narrowing:
    """Candidates in arrays, for repeated selection of subsets."""

    __slots__ = ("_are_prefill", "_candidates", "_group_of", "_ranks", "_workers")

    def __init__(self, candidates: Candidates) -> None:
        count = len(candidates)
        self._candidates = candidates
        self._ranks = np.fromiter(candidates.ranks, object, count)
        self._workers = np.fromiter(candidates.workers, object, count)
        prefill = (worker.role == "prefill" for worker in candidates.workers)
        self._are_prefill = np.fromiter(prefill, np.bool_, count)
        self._group_of = np.empty(count, np.int64)
        for group, (_, places) in enumerate(candidates.groups):
            self._group_of[places[:, 0]] = group

    def only(self, kept: Positions) -> Candidates:
        """Return the candidates at these positions, which are in order.

        O(candidates), without a step of Python for each.
        """
        all_of_them = self._candidates
        slots, groups = all_of_them.slots[kept], []
        if len(all_of_them.groups) == 1:
            groups = [(all_of_them.identities[0], _places(np.arange(len(kept)), slots))]
        else:
            group_of = self._group_of[kept]
            for group, identity in enumerate(all_of_them.identities):
                positions = np.flatnonzero(group_of == group)
                if len(positions):
                    groups.append((identity, _places(positions, slots)))
        return Candidates(
            tuple(self._ranks[kept].tolist()),
            tuple(self._workers[kept].tolist()),
            slots,
            groups,
            [identity for identity, _ in groups],
            all_of_them.have_prefill and bool(self._are_prefill[kept].any()),
        )


def _laid_out(pairs: Sequence[tuple[Rank, WorkerAnnouncement]], slots: Positions) -> Candidates:
    by_identity: dict[Identity, list[int]] = {}
    for position, (_, worker) in enumerate(pairs):
        by_identity.setdefault(worker.identity, []).append(position)
    return Candidates(
        tuple(rank for rank, _ in pairs),
        tuple(worker for _, worker in pairs),
        slots,
        tuple((each, _places(found, slots)) for each, found in by_identity.items()),
        tuple(by_identity),
        any(worker.role == "prefill" for _, worker in pairs),
    )


def _places(positions: Sequence[int] | Positions, slots: Positions) -> Positions:
    places = np.empty((len(positions), 2), np.int64)  # column_stack takes five times as long
    places[:, 0], places[:, 1] = positions, slots[positions]
    return places
