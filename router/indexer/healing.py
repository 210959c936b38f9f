"""Ranks whose index is found to be wrong, and the checkpoints that heal them.

digest differs, or no room ─▶ break_off ─▶ the rank's log is broken ─▶ take_wanted ─▶ checkpoint
"""

from collections.abc import Mapping

from router.indexer.base import Indexer
from router.indexer.rank_index import RankIndex
from router.protocol.values import Rank

CHECKPOINT_WAIT_S = 1.0
"""How long a doubt waits to be healed by the log itself before a checkpoint is asked for."""

CHECKPOINT_RETRY_S = 2.0
"""How long an asked-for checkpoint may take before it is asked for again."""

ROOM_WANTED = 0.9
"""A rank that did not fit is tried again when so much of the limit, or less, is in use."""

_FULL = "limit on indexed blocks reached"


class Healing:
    """Breaks off the logs of `ranks`, and says which of them want a checkpoint.

    `refused_messages`: how many did not fit under the limit on blocks. `differences`: how often a
    rank's index was found not to be what its agent said.
    """

    __slots__ = ("_ranks", "differences", "refused_messages")

    def __init__(self, ranks: Mapping[Rank, RankIndex]) -> None:
        self._ranks = ranks
        self.differences = 0
        self.refused_messages = 0

    def refuse(self, place: RankIndex, now_s: float) -> None:
        """A message of this rank did not fit under the limit on blocks."""
        self.refused_messages += 1
        place.log.break_off(_FULL, now_s)

    def break_off(self, place: RankIndex, rank: Rank, now_s: float) -> None:
        """A rank's index is not what its agent says; passed over while it is being restored."""
        place.indexer.note_holes(rank, None)
        if place.is_unsettled:
            return
        if _has_room(place.indexer):
            self.differences += 1
            place.log.break_off("digest differs", now_s)
        else:  # what differs for want of room is not healed by saying it again
            place.log.break_off(_FULL, now_s)

    def take_differing(self, indexer: Indexer, now_s: float) -> None:
        """Break off whatever the checks of an indexer have found to differ."""
        for rank in indexer.take_differing():
            place = self._ranks.get(rank)
            if place is not None:
                self.break_off(place, rank, now_s)

    def take_wanted(self, now_s: float) -> list[tuple[Rank, str]]:
        """Ranks whose doubt has lasted, and why; each is named at most once per retry time."""
        wanted: list[tuple[Rank, str]] = []
        for rank, place in self._ranks.items():
            if place.log.broken_reason == _FULL and not _has_room(place.indexer):
                continue
            since = place.log.doubt_since_s
            waited = since is not None and now_s - since >= CHECKPOINT_WAIT_S
            if waited and now_s - place.asked_s >= CHECKPOINT_RETRY_S:
                place.asked_s = now_s
                wanted.append((rank, place.log.broken_reason or "behind its reports"))
        return wanted


def _has_room(indexer: Indexer) -> bool:
    stats = indexer.stats()
    return not stats.max_blocks or stats.blocks <= ROOM_WANTED * stats.max_blocks
