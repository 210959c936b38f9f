"""The builder of a decision's terms, by one kernel call per identity."""

from math import inf, nan

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from router.indexer.base import SearchedTree
from router.protocol.values import TIERS, Identity, Phase, Rank, Scope
from router.scheduler._place_kernel import (
    COUNTS_OUTPUT,
    HAS_PHASE,
    HIDES_BLOCKS,
    IS_DECODE,
    IS_LAST,
    NO_SLOT,
    SHARES_BLOCKS,
    place,
)
from router.scheduler.candidates import Candidates
from router.scheduler.herd import ALONE, ExpectedLoad
from router.scheduler.terms import COLUMNS, FloatArray, TermTable
from router.sequence.active.footprint import COUNT_ALL, TrackedParts
from router.sequence.active.prompt import Prompt
from router.sequence.active.tracker import Tracker
from router.sequence.rank_table import RankTable

FoundRows = npt.NDArray[np.uint32]
"""Rows {slot, overlap in each cumulative tier} of the ranks that hold part of a prompt."""

NOTHING: FloatArray = np.empty(0)
"""The argument for kernels in place of an array that is not wanted."""


class SearchTable:
    """The trees of a scope, and the slots of their holders, as the kernel searches them.

    Valid while these are the scope's trees, their holders have not changed, and no rank has come or
    gone. `rows`: of each tree its address, then the slot of each holder, or NO_SLOT. `rank_of`: the
    rank of each slot; never changed afterwards.
    """

    __slots__ = ("_trees", "_versions", "rank_of", "rows")

    def __init__(self, trees: tuple[SearchedTree, ...], table: RankTable) -> None:
        self._trees = trees
        self._versions = [(tree.holders, tree.holders.version) for tree in trees]
        most = max((len(tree.holders.rank_of) for tree in trees), default=0)
        self.rows = np.full((len(trees), 1 + most), NO_SLOT, np.int64)
        self.rank_of: dict[int, Rank] = {}
        for row, tree in zip(self.rows, trees, strict=True):
            row[0] = tree.address
            for holder, rank in enumerate(tree.holders.rank_of, 1):
                if (slot := table.find(rank)) is not None:
                    row[holder], self.rank_of[slot] = slot, rank

    def fits(self, trees: tuple[SearchedTree, ...]) -> bool:
        """Return whether these are the trees, with the same holders."""
        if trees != self._trees:
            return False
        for holders, version in self._versions:  # noqa: SIM110 - a generator costs 0.3 µs
            if holders.version != version:
                return False
        return True


class Wanted(Struct, frozen=True, eq=False, gc=False):
    """The part of a decision's input that is neither its prompt nor its candidates.

    `tracking`: the counted parts. `factors`: the cost factors of preferred taints; None for none.
    `weights`: of the policy `predictive`, if its costs are wanted with the terms. `most_ttft_s`,
    `most_tpot_s`: the objectives, which the weights contain too.
    """

    scope: Scope
    now_s: float
    tracking: TrackedParts
    factors: FloatArray | None = None
    phase: Phase | None = None
    expected_output_tokens: int | None = None
    claims: ExpectedLoad = ALONE
    weights: FloatArray | None = None
    most_ttft_s: float = inf
    most_tpot_s: float = inf


class TermBuilder:
    """A builder of candidates' terms from the rank table, the tracker and the index.

    `counts_output`: output blocks count as load. `models_prefill`: prompts that are being computed
    count by their expected progress. Owns only scratch arrays, which are zero between calls.
    """

    __slots__ = ("_counts_output", "_depths", "_models_prefill", "_overlaps", "_table", "_tracker")

    def __init__(
        self,
        table: RankTable,
        tracker: Tracker,
        *,
        counts_output: bool = True,
        models_prefill: bool = False,
    ) -> None:
        self._table = table
        self._tracker = tracker
        self._counts_output = COUNTS_OUTPUT if counts_output else 0
        self._models_prefill = models_prefill
        self._overlaps, self._depths = np.zeros((0, TIERS)), np.zeros(0)

    def build(
        self, search: SearchTable, candidates: Candidates, prompt: Prompt, wanted: Wanted
    ) -> tuple[TermTable, dict[Identity, FoundRows]]:
        """Return the terms of every candidate, and the overlaps of all ranks, by identity.

        O(tokens that are not hashed + candidates + matches).
        """
        table, tracker, groups = self._table.values, self._tracker, candidates.groups
        if len(self._depths) != len(table):
            self._overlaps, self._depths = np.zeros((len(table), TIERS)), np.zeros(len(table))
        terms, costs = np.empty((len(candidates.slots), COLUMNS)), NOTHING
        factors = NOTHING if wanted.factors is None else wanted.factors
        weights = None if self._models_prefill else wanted.weights
        expected, isl_tokens, now_s = wanted.expected_output_tokens, prompt.isl_tokens, wanted.now_s
        flags = self._counts_output | SHARES_BLOCKS
        if wanted.phase is not None or wanted.tracking != COUNT_ALL:
            flags = self._flags(wanted.tracking, wanted.phase)
        found: dict[Identity, FoundRows] = {}
        first, ties, most = 0, 0, 0.0
        for identity, places in groups:
            if identity is groups[-1][0]:  # now all candidates have their terms
                costs = NOTHING if weights is None else np.empty(len(terms))
                flags |= IS_LAST
            hashed, tokens = prompt.laid_out(identity)
            rows = np.empty((len(search.rank_of), 1 + TIERS), np.uint32)
            count, first, ties, most = place(
                search.rows,
                tokens,
                identity.block_size,
                identity.block_size + identity.eagle,
                prompt.seed,
                hashed.sequence_hashes,
                table,
                places,
                self._overlaps,
                rows,
                factors,
                isl_tokens,
                nan if expected is None else expected,
                now_s,
                flags,
                NOTHING if weights is None else weights,
                terms,
                costs,
                tracker.state,
                hashed.load_hashes,
                self._depths,
                candidates.slots,
                wanted.claims.estimate,
                wanted.claims.ours,
            )
            found[identity] = rows[:count]
        if self._models_prefill:
            tracker.subtract_progress(terms, candidates.slots, now_s)
        scope, ranks, slots = wanted.scope, candidates.ranks, candidates.slots
        known = (wanted.claims, None if weights is None else costs, first, ties, most, slots)
        objectives = (wanted.most_ttft_s, wanted.most_tpot_s)
        return TermTable(
            scope, ranks, terms, isl_tokens, expected, now_s, *known, *objectives
        ), found

    def _flags(self, tracking: TrackedParts, phase: Phase | None) -> int:
        """Return the kernel's flags."""
        flags = self._counts_output
        if phase is not None:
            flags |= HAS_PHASE | (IS_DECODE if phase == "decode" else 0)
        if not tracking.active_blocks:
            return flags | HIDES_BLOCKS | SHARES_BLOCKS
        return flags | SHARES_BLOCKS if tracking.kv_reuse else flags
