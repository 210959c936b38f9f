"""Where a request was placed, and all that says why."""

from typing import Any

from msgspec import Struct

from router.indexer.base import OverlapScores
from router.placement_errors import RemovedRanks
from router.protocol.catalogue import WorkerAnnouncement
from router.protocol.values import Rank
from router.scheduler.gate import Passed
from router.scheduler.selector import Choice, Reasons
from router.scheduler.settings import PolicySettings
from router.scheduler.terms import OVERLAP_DEVICE, OVERLAP_REMOTE, FloatArray
from router.sequence.prompt import HashedPrompt
from router.sequence.tracking import Tracking


class Placement(Struct, frozen=True):
    """A choice among candidates, with what it was made from. `tracking`: what of it is counted."""

    choice: Choice
    worker: WorkerAnnouncement
    prompt: HashedPrompt
    overlaps: OverlapScores
    passed: Passed
    settings: PolicySettings
    tracking: Tracking

    @property
    def rank(self) -> Rank:
        """The chosen rank."""
        return self.choice.table.ranks[self.choice.index]

    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt on its device."""
        return int(self.choice.table.values[self.choice.index, OVERLAP_DEVICE])

    @property
    def held_blocks(self) -> int:
        """Leading blocks of the prompt in any of its tiers."""
        return int(self.choice.table.values[self.choice.index, OVERLAP_REMOTE])

    @property
    def uncached_tokens(self) -> int:
        """Tokens of the prompt that are left to compute."""
        return self.prompt.prefill_tokens(self.overlap_blocks)


class Explained(Struct, frozen=True, eq=False):
    """What callers may ask about a placement afterwards.

    `predicted_s`: a row a candidate, as `_predictive_kernel` names the columns, whatever the
    policy. `settings`: what policies were told. `removed`: who was no candidate, and why not.
    """

    reasons: Reasons
    settings: dict[str, Any]
    predicted_s: FloatArray
    removed: list[RemovedRanks]
