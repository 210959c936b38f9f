"""Leading blocks of a prompt on their way up: which have come, and which will not."""

from collections.abc import Sequence
from enum import StrEnum

from torch import Tensor


class Load(StrEnum):
    """What became of a block that was to be loaded."""

    WAITING = "waiting"
    LOADED = "loaded"
    LOST = "lost"
    """No tier has it, or none that could give it as it was stored."""
    LATE = "late"
    """It had not come when the time was over."""
    CANCELLED = "cancelled"
    """Nobody wants it any more, or it comes after one that is not there."""


class Loading:
    """`rows[i]`, (n, block bytes) on the host, is the block of `identities[i]`, for i < `loaded`:
    proven to be what was stored under that name, of host memory a sample. Belongs to the stack's
    owner.

    Invariant: `loaded` counts the leading blocks that have come; it never goes back.
    """

    __slots__ = ("_end", "deadline_s", "identities", "in_flight", "is_whole", "loaded", "outcomes",
                 "rows")  # fmt: skip

    def __init__(
        self, identities: Sequence[bytes], rows: Tensor, deadline_s: float, *, is_whole: bool
    ) -> None:
        """`is_whole`: either all of them count, or none."""
        self.identities = identities
        self.rows = rows
        self.deadline_s = deadline_s
        self.is_whole = is_whole
        self.outcomes = [Load.WAITING] * len(identities)
        self.loaded = 0
        self.in_flight = 0
        """Calls to tiers that may still write into `rows`, behind what is loaded."""
        self._end = len(identities)

    @property
    def is_done(self) -> bool:
        """Nothing more will come."""
        return self.loaded == self._end

    @property
    def usable_blocks(self) -> int:
        """How many leading blocks may be used now that it is done."""
        return self.loaded if not self.is_whole or self.loaded == len(self.identities) else 0

    def wants(self, place: int) -> bool:
        """Whether the block there would still be of use."""
        return place < self._end

    def came(self, start: int, count: int) -> None:
        """So many blocks from `start` have come."""
        for place in range(start, min(start + count, self._end)):
            self.outcomes[place] = Load.LOADED
        while self.loaded < self._end and self.outcomes[self.loaded] is Load.LOADED:
            self.loaded += 1

    def lost(self, place: int) -> None:
        """That block will not come; what is behind it is of no use, nor is what is before it where
        all are wanted.
        """
        if self.wants(place):
            self.outcomes[place] = Load.LOST
            self._end_at(self.loaded if self.is_whole else place, Load.CANCELLED)

    def late(self) -> None:
        """The time is over."""
        self._end_at(self.loaded, Load.LATE)

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._end_at(self.loaded, Load.CANCELLED)

    def _end_at(self, place: int, reason: Load) -> None:
        self._end = min(self._end, place)
        for later in range(place, len(self.outcomes)):
            if self.outcomes[later] in {Load.WAITING, Load.LOADED}:
                self.outcomes[later] = reason
