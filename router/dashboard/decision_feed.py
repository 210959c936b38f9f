"""Some of the decisions, for who watches: sampled where they are made, explained afterwards.

While nobody watches nothing is taken, and nothing is spent.
"""

from collections import deque

from msgspec import Struct

from router.core import RouterCore
from router.dashboard.hot_prefixes import HotPrefixes
from router.logged_decisions import LoggedDecision, logged_decision, without_prompt
from router.placement import Placement
from router.protocol.requests import SelectRequest
from router.protocol.values import Rank
from router.scheduler.terms import OVERLAP_REMOTE
from router.sequence.rank_table import EAGLE

PER_S = 4.0
WAITING = 8
"""Decisions that may wait to be explained; a burst beyond is skipped."""

KEPT = 32
"""Shown to who comes later."""

CANDIDATES = 8
"""The chosen one, and the cheapest of the others."""


class SeenDecision(Struct, frozen=True):
    """A decision of the feed; `number` counts them. `is_booked`: it was not only asked for."""

    number: int
    is_booked: bool
    decision: LoggedDecision


class _Taken(Struct, frozen=True, eq=False):
    at: float
    command: str
    request: SelectRequest
    placement: Placement


class DecisionFeed:
    """Takes decisions, at most `PER_S` a second, and counts those passed by.

    `predicted`: of each rank, prompt tokens of all decisions and those of them that were predicted
    to be cached, since they were last taken away.
    """

    __slots__ = (
        "_due_s",
        "_taken",
        "kept",
        "number",
        "predicted",
        "prefixes",
        "skipped",
    )

    def __init__(self) -> None:
        self._due_s = 0.0
        self._taken: deque[_Taken] = deque()
        self.kept: deque[SeenDecision] = deque(maxlen=KEPT)
        self.number = self.skipped = 0
        self.prefixes = HotPrefixes()
        self.predicted: dict[Rank, list[int]] = {}

    def take(
        self, command: str, request: SelectRequest, placement: Placement, now_s: float, at: float
    ) -> None:
        """A decision was made. Never raises. O(1).

        One that had a single rank to choose from and books nothing is passed over: a forwarder asks
        so where each worker listens.
        """
        if request.pinned_worker is not None and command == "select":
            return
        prompt, row = placement.prompt, placement.choice.table.values[placement.choice.index]
        counted = self.predicted.setdefault(placement.rank, [0, 0])
        counted[0] += prompt.isl_tokens
        cached_blocks = prompt.cached_blocks(int(row[OVERLAP_REMOTE]), eagle=bool(row[EAGLE]))
        counted[1] += cached_blocks * prompt.block_size
        if now_s < self._due_s or len(self._taken) >= WAITING:
            self.skipped += 1
            return
        self._due_s = max(self._due_s, now_s - 1.0) + 1 / PER_S
        self._taken.append(_Taken(at, command, without_prompt(request), placement))

    def explain_next(self, core: RouterCore, now_s: float) -> SeenDecision | None:
        """The next one that was taken, explained; None: there is none. O(candidates)."""
        if not self._taken:
            return None
        taken = self._taken.popleft()
        placement = taken.placement
        self.number += 1
        matched_blocks = int(placement.choice.table.values[:, OVERLAP_REMOTE].max())
        self.prefixes.note(
            taken.request.scope,
            placement.prompt.public_hashes,
            matched_blocks,
            placement.prompt.block_size,
        )
        decision = logged_decision(core, taken.request, placement, CANDIDATES, taken.at, now_s)
        seen = SeenDecision(self.number, taken.command != "select", decision)
        self.kept.append(seen)
        return seen

    def take_predicted(self, rank: Rank) -> list[int]:
        """Prompt tokens of a rank, and those predicted to be cached, since last asked."""
        return self.predicted.pop(rank, [0, 0])

    def forget_waiting(self) -> None:
        """Nobody watches any more."""
        self._taken.clear()
        self.predicted.clear()
