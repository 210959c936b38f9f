"""From a prompt and its candidates to the terms of a decision, without an object a candidate."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from router.indexer.base import OverlapScores
from router.indexer.matches import Matches
from router.protocol.requests import PromptRequest
from router.protocol.values import TIERS, Identity, Rank
from router.scheduler._gather import NO_SLOT, gather
from router.scheduler.candidates import Candidates
from router.scheduler.terms import COLUMNS, TermTable
from router.sequence.prompt import HashedPrompt, Prompt
from router.sequence.rank_table import RankTable
from router.sequence.tracker import Tracker

MatchRows: TypeAlias = npt.NDArray[np.uint32]
Slots: TypeAlias = npt.NDArray[np.int64]


class Weighing:
    """Weighs candidates by what the rank table, the tracker and the index say.

    Holds nothing but scratch space, and the last translations from an index's holders to slots.
    """

    __slots__ = ("_depths", "_overlaps", "_slots_of", "_table", "_tracker")

    def __init__(self, table: RankTable, tracker: Tracker) -> None:
        self._table = table
        self._tracker = tracker
        self._overlaps = np.zeros((0, TIERS))
        self._depths = np.zeros(0)
        self._slots_of: dict[Identity, _HolderSlots] = {}

    def weigh(
        self,
        request: PromptRequest,
        prompt: Prompt,
        candidates: Candidates,
        overlaps: Mapping[Identity, OverlapScores],
        expected_output_tokens: int | None,
        now_s: float,
    ) -> TermTable:
        """Terms of every candidate. `overlaps`: the prompt's matches under each identity in use.

        O(candidates + matches).
        """
        values = np.empty((len(candidates.ranks), COLUMNS))
        for identity, positions in candidates.groups:
            hashed = prompt.hashed(identity)
            self._gather(hashed, identity, candidates.slots, positions, overlaps[identity], values)
        return TermTable(
            request.scope,
            candidates.ranks,
            values,
            prompt.isl_tokens,
            expected_output_tokens,
            now_s,
        )

    def _gather(
        self,
        hashed: HashedPrompt,
        identity: Identity,
        slots: Slots,
        positions: Slots,
        found: OverlapScores,
        values: npt.NDArray[np.float64],
    ) -> None:
        if len(self._depths) != len(self._table.values):
            self._overlaps = np.zeros((len(self._table.values), TIERS))
            self._depths = np.zeros(len(self._table.values))
        self._tracker.write_depths(hashed.load_hashes, self._depths)
        matches, slot_of = self._rows(identity, found)
        gather(
            self._table.values,
            slots,
            positions,
            matches,
            slot_of,
            self._overlaps,
            self._depths,
            len(hashed.load_hashes) + hashed.own_blocks,
            hashed.isl_tokens,
            values,
        )

    def _rows(self, identity: Identity, found: OverlapScores) -> tuple[MatchRows, Slots]:
        """Matches as rows {holder, ends}, and the slot of each holder."""
        if not isinstance(found, Matches):
            return _numbered(found, self._table)
        return found.array, self.slots_of(identity, found.rank_of)

    def slots_of(self, identity: Identity, rank_of: Sequence[Rank]) -> Slots:
        """The slot of each holder of an index, or NO_SLOT."""
        known = self._slots_of.get(identity)
        if known is None or not known.fits(rank_of, self._table):
            known = self._slots_of[identity] = _HolderSlots(rank_of, self._table)
        return known.slots


class _HolderSlots:
    """The slots of an index's holders, while neither of the two changes."""

    __slots__ = ("_count", "_rank_of", "_version", "slots")

    def __init__(self, rank_of: Sequence[Rank], table: RankTable) -> None:
        self._rank_of = rank_of
        self._count = len(rank_of)
        self._version = table.version
        found = (table.find(rank) for rank in rank_of)
        self.slots = np.array([NO_SLOT if slot is None else slot for slot in found], np.int64)

    def fits(self, rank_of: Sequence[Rank], table: RankTable) -> bool:
        """Whether nothing has changed since; the sequence only ever grows in place."""
        return (
            rank_of is self._rank_of
            and len(rank_of) == self._count
            and table.version == self._version
        )


def _numbered(found: OverlapScores, table: RankTable) -> tuple[MatchRows, Slots]:
    """The same of matches that are Python objects: their slots are their holders."""
    rows = [
        (slot, *astuple(overlap))
        for rank, overlap in found.items()
        if (slot := table.find(rank)) is not None
    ]
    matches = np.array(rows, np.uint32).reshape(-1, 1 + TIERS)
    return matches, np.arange(len(table.values))
