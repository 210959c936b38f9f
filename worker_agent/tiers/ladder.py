"""Whom the leading blocks of one prompt may come from, fastest first; pure.

    host ─ disk ─ another worker's memory ─ the store that all share

What holds a block for certain is asked before what may have it.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from worker_agent.tiers.level import Giver, Levels, WorkingLevel


class Ladder:
    """Givers of the blocks of one prompt; an index into `givers` is a rung.

    `identities`: of its leading blocks. `peer`, which has the first `peer_blocks` of them.
    """

    __slots__ = ("_held", "_identities", "_peer", "_peer_blocks", "givers")

    def __init__(
        self,
        tiers: Levels,
        identities: Sequence[bytes],
        peer: Giver | None = None,
        peer_blocks: int = 0,
    ) -> None:
        levels: list[Giver] = [level for level in tiers.levels if not level.is_shared]
        shared: list[Giver] = [level for level in tiers.levels if level.is_shared]
        self.givers = [*levels, *([] if peer is None else [peer]), *shared]
        self._held = tiers.held
        self._identities = identities
        self._peer = peer
        self._peer_blocks = peer_blocks

    def runs(self, start: int, stop: int, below: int = -1) -> Iterator[tuple[int, range]]:
        """Rungs below this one and the places they may have, from `start` on, cut by the highest
        that does; ends where there is none. O(blocks × rungs).
        """
        places = range(start, stop)
        for rung, group in groupby(places, lambda place: self._highest(place, below)):
            if rung is None:
                return
            run = list(group)
            yield rung, range(run[0], run[-1] + 1)

    def _highest(self, place: int, below: int) -> int | None:
        held = self._held.tiers(self._identities[place])
        for rung in range(below + 1, len(self.givers)):
            if self._may_have(self.givers[rung], place, held):
                return rung
        return None

    def _may_have(self, giver: Giver, place: int, held: int) -> bool:
        if giver is self._peer:
            return place < self._peer_blocks and not giver.worker.is_broken
        assert isinstance(giver, WorkingLevel)
        return bool(held & giver.bit) or (giver.is_shared and not giver.worker.is_broken)
