"""A sample of the decisions for the dashboard, taken when made and explained afterwards.

Without a viewer the sample is smaller, so that the last `KEPT` decisions reach further back.
"""

from collections import deque

from msgspec import Struct

from router.core.core import RouterCore
from router.core.placement import Placement
from router.core.views.decisions import LoggedDecision, logged_decision, without_prompt
from router.dashboard.board.hot_prefixes import HotPrefixes
from router.dashboard.board.latency import Latencies, Timed
from router.protocol.requests import SelectRequest
from router.protocol.values import Rank
from router.scheduler.terms import OVERLAP_REMOTE
from router.sequence.rank_table import EAGLE

PER_S = 4.0
UNWATCHED_PER_S = 0.25
WAITING = 8
"""The limit of decisions that wait to be explained; those beyond it are skipped."""

BURST = 4
"""The decisions sampled at once after a pause."""

KEPT = 200
"""The number of decisions that are remembered; about 3 MB of them, where there are 8 candidates."""

SHOWN = 32
"""Those of them in a new viewer's first frame; it requests the others."""

CANDIDATES = 8
"""The number of candidates shown: the chosen one, and the cheapest of the others."""


class SeenDecision(Struct, frozen=True):
    """A decision of the feed.

    `number` counts the decisions shown. `is_booked`: False for a selection without a reservation.
    """

    number: int
    is_booked: bool
    decision: LoggedDecision


class _Taken(Struct, frozen=True, eq=False):
    at: float
    command: str
    request: SelectRequest
    placement: Placement
    timed: Timed | None


class DecisionFeed:
    """A sampler of decisions, at most `PER_S` per second; it counts the skipped ones.

    `kept`: the last ones, oldest first. `latencies`: the times of those that were booked.
    `is_watched`: there is a viewer. `predicted`: per rank, the prompt tokens of all decisions, and
    those of them predicted to be cached, since they were last taken; counted for viewers alone.
    """

    __slots__ = (
        "_due_s",
        "_taken",
        "is_watched",
        "kept",
        "latencies",
        "number",
        "predicted",
        "prefixes",
        "skipped",
    )

    def __init__(self) -> None:
        self._due_s = 0.0
        self._taken: deque[_Taken] = deque()
        self.is_watched = False
        self.kept: deque[SeenDecision] = deque(maxlen=KEPT)
        self.number = self.skipped = 0
        self.prefixes = HotPrefixes()
        self.latencies = Latencies()
        self.predicted: dict[Rank, list[int]] = {}

    def take(
        self, command: str, request: SelectRequest, placement: Placement, now_s: float, at: float
    ) -> float:
        """Sample a decision; return for how many seconds no other one is wanted. O(1).

        Viewers want to count all of them. Ignores selections without a reservation that are pinned
        to a worker: a forwarder uses them to look up its endpoint. Never raises.
        """
        if request.pinned_worker is not None and command == "select":
            return 0.0
        if self.is_watched:
            self._count_predicted(placement)
        if now_s < self._due_s or len(self._taken) >= WAITING:
            self.skipped += self.is_watched
            return self._rest_s(now_s)
        per_s = PER_S if self.is_watched else UNWATCHED_PER_S
        self._due_s = max(self._due_s, now_s - BURST / per_s) + 1 / per_s
        timed = None
        if command != "select" and request.request_id is not None:
            model_name, rank = request.model_name, placement.rank
            timed = self.latencies.begin(request.request_id, model_name, rank, now_s)
        self._taken.append(_Taken(at, command, without_prompt(request), placement, timed))
        return self._rest_s(now_s)

    def _rest_s(self, now_s: float) -> float:
        return 0.0 if self.is_watched else max(self._due_s - now_s, 0.0)

    def explain_next(self, core: RouterCore, now_s: float) -> SeenDecision | None:
        """Explain the next sampled decision. Returns None if there is none. O(candidates)."""
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
        if taken.timed is not None:
            predicted = decision.shown[0].predicted
            taken.timed.predicted_ttft_s = predicted.time_to_first_token_s
            taken.timed.predicted_tpot_s = predicted.time_per_output_token_s
        seen = SeenDecision(self.number, taken.command != "select", decision)
        self.kept.append(seen)
        return seen

    def take_predicted(self, rank: Rank) -> list[int]:
        """Return and reset a rank's prompt tokens, and those of them predicted to be cached."""
        return self.predicted.pop(rank, [0, 0])

    def watch(self, *, is_watched: bool) -> None:
        """Sample for viewers, or without one."""
        self.is_watched = is_watched
        self._due_s = 0.0
        self.predicted.clear()

    def _count_predicted(self, placement: Placement) -> None:
        prompt, row = placement.prompt, placement.choice.table.values[placement.choice.index]
        counted = self.predicted.setdefault(placement.rank, [0, 0])
        counted[0] += prompt.isl_tokens
        cached_blocks = prompt.cached_blocks(int(row[OVERLAP_REMOTE]), eagle=bool(row[EAGLE]))
        counted[1] += cached_blocks * prompt.block_size
