"""What a source of a rank's events tells of what it holds: a journal that is its own, or its part
of one (`consolidated.py`).
"""

from typing import Protocol

from router.protocol.values import HashArray, HeldState, Identity, Tier
from router.sequence.naming import BlockNaming


class SourceJournal(Protocol):
    """Blocks come here by their bus names; `state` and `held` are of this source alone."""

    naming: BlockNaming

    @property
    def identity(self) -> Identity:
        """How blocks are named."""

    @property
    def incarnation(self) -> int:
        """The rank's present life."""

    @property
    def state(self) -> HeldState:
        """What is held at this moment."""

    @property
    def has_news(self) -> bool:
        """Is there a message to take?"""

    def stored_paths(self, tier: Tier, sequence_hashes: HashArray, heads: HashArray) -> HashArray:
        """Runs of consecutive blocks (`held.path_heads`) are now in this tier; those that were new
        in it.
        """

    def removed(self, tier: Tier, sequence_hashes: HashArray) -> HashArray:
        """Blocks are no longer in this tier; those that were held in it."""

    def cleared(self, tier: Tier | None = None) -> None:
        """A tier is empty; None: all are."""

    def held(self, tier: Tier) -> HashArray:
        """Every block held in this tier, in no order."""

    def new_life(self, incarnation: int) -> None:
        """The cache begins anew: it holds nothing."""

    def set_doubts(self, doubts: int) -> None:
        """A sum of `Doubt`s, part of every state from now on."""

    def require_checkpoint(self) -> None:
        """The next message must be a checkpoint."""
