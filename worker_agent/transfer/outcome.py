"""What became of each block of a transfer: a count could not say which block is bad."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import takewhile


class Outcome(StrEnum):
    """What became of one block."""

    DONE = "done"
    """It was copied."""
    KNOWN = "known"
    """It was there before."""
    MISSING = "missing"
    """It is not there."""
    FULL = "full"
    """There is no room for it."""
    BUSY = "busy"
    """Another worker is writing it."""
    FAILED = "failed"
    """The storage did not do it, or not in time."""
    CORRUPT = "corrupt"
    """Its bytes are not those that were stored."""


ARRIVED = frozenset({Outcome.DONE, Outcome.KNOWN})


def leading(outcomes: Sequence[Outcome]) -> int:
    """How many leading blocks are where they were to be."""
    return sum(1 for _ in takewhile(ARRIVED.__contains__, outcomes))
