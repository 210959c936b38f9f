"""The placement of a request, and its explanation."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from router.indexer.base import OverlapScores
from router.indexer.radix_tree.matches import Matches
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.replies import RemovedRanks
from router.protocol.values import Rank
from router.scheduler.eligibility import EligibleRanks
from router.scheduler.selector import Choice, Reasons
from router.scheduler.settings import PolicySettings
from router.scheduler.term_builder import FoundRows
from router.scheduler.terms import OVERLAP_DEVICE, FloatArray
from router.sequence.active.footprint import TrackedParts
from router.sequence.active.promises import Promise
from router.sequence.active.prompt import HashedPrompt


class Placement(Struct, frozen=True, eq=False, gc=False):
    """A choice among candidates, with its inputs.

    `tracking`: the parts counted as load. `promise`: if the request has objectives. `found`: rows
    {slot, overlap in each cumulative tier}; `rank_of`: the ranks of these slots.
    """

    choice: Choice
    worker: WorkerAnnouncement
    prompt: HashedPrompt
    passed: EligibleRanks
    settings: PolicySettings
    tracking: TrackedParts
    found: FoundRows
    rank_of: Mapping[int, Rank]
    promise: Promise | None = None

    @property
    def overlaps(self) -> OverlapScores:
        """The cached prefix of every rank of the scope, candidate or not."""
        return Matches(self.rank_of, self.found.tobytes())

    @property
    def rank(self) -> Rank:
        """The chosen rank."""
        return self.choice.table.ranks[self.choice.index]

    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt that are cached on its device."""
        return int(self.choice.table.values[self.choice.index, OVERLAP_DEVICE])

    @property
    def uncached_tokens(self) -> int:
        """Tokens of the prompt that remain to be computed."""
        return self.prompt.prefill_tokens(self.overlap_blocks)


class Explained(Struct, frozen=True, eq=False):
    """The explanation of a placement, as callers can request it afterwards.

    `predicted_s`: one row per candidate with the columns that `_predicted_parts` names, for any
    policy. `settings`: the settings of the policy. `removed`: the ranks that were not candidates,
    with reasons.
    """

    reasons: Reasons
    settings: dict[str, Any]
    predicted_s: FloatArray
    removed: list[RemovedRanks]
