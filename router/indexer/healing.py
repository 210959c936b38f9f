"""Detection of ranks with a wrong index, and requests of checkpoints that heal them.

digest differs, or no room ─▶ break_off ─▶ the rank's log is broken ─▶ take_wanted ─▶ checkpoint
"""

from collections.abc import Mapping

from router.indexer.base import Indexer
from router.indexer.rank_index import RankIndex
from router.protocol.values import Rank

CHECKPOINT_WAIT_S = 1.0
"""Time for the log itself to resolve a doubt, before a checkpoint is requested."""

CHECKPOINT_RETRY_S = 2.0
"""Timeout of a requested checkpoint, after which it is requested again."""

ROOM_WANTED = 0.9
"""Fraction of the limit on blocks at or below which a rank that did not fit is tried again."""

_FULL = "limit on indexed blocks reached"


class Resync:
    """The repair of `ranks`: marks wrong ones as broken, and selects those to be checkpointed.

    `refused_messages`: number of messages that did not fit under the limit on blocks.
    `differences`: number of times a rank's index differed from its agent's report.
    """

    __slots__ = ("_ranks", "differences", "refused_messages")

    def __init__(self, ranks: Mapping[Rank, RankIndex]) -> None:
        self._ranks = ranks
        self.differences = 0
        self.refused_messages = 0

    def refuse(self, place: RankIndex, now_s: float) -> None:
        """Mark a rank as broken because a message did not fit under the limit on blocks."""
        self.refused_messages += 1
        place.log.break_off(_FULL, now_s)

    def break_off(self, place: RankIndex, rank: Rank, now_s: float) -> None:
        """Mark a rank as broken because its index differs; ignored while it is being restored."""
        place.indexer.note_holes(rank, None)
        if place.is_unsettled:
            return
        if _has_room(place.indexer):
            self.differences += 1
            place.log.break_off("digest differs", now_s)
        else:  # a difference for lack of room is not healed by repeating the blocks
            place.log.break_off(_FULL, now_s)

    def take_differing(self, indexer: Indexer, now_s: float) -> None:
        """Mark as broken the ranks that an indexer's checks found to differ."""
        for rank in indexer.take_differing():
            place = self._ranks.get(rank)
            if place is not None:
                self.break_off(place, rank, now_s)

    def take_wanted(self, now_s: float) -> list[tuple[Rank, str]]:
        """Return ranks with a persistent doubt, and why; each at most once per retry time."""
        wanted: list[tuple[Rank, str]] = []
        for rank, place in self._ranks.items():
            if place.no_events is not None or place.is_estimated:
                continue
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
    most = max(stats.blocks, stats.class_blocks)
    return not stats.max_blocks or most <= ROOM_WANTED * stats.max_blocks
