"""The content of the dashboard, as frames encoded once for all viewers."""

from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import version
from math import inf

from msgspec import json

from router.core.core import RouterCore
from router.core.views.accuracy import Misprediction, findings, sentence
from router.dashboard.board.decision_feed import SHOWN, DecisionFeed, SeenDecision
from router.dashboard.board.frames import Columns, Frame, Point, Prefixes, Totals
from router.dashboard.board.hit_window import HitWindow, fraction
from router.dashboard.board.latency import LatencyRow
from router.dashboard.board.table import RANK_COLUMNS, WORKER_COLUMNS, Table
from router.observability.event_timeline import EventTimeline
from router.observability.health import ServiceStatus

HISTORY_S = 900.0
HISTORY_POINTS = 900
"""The time for which samples are kept, and their number at most; about 0.2 MB."""

MEAN_S = 10.0
"""Rates are means over this time."""

PREFIXES = 8
MISPREDICTED = 16
FADE_S = 600.0
"""The half-life of the prefix counts."""

_COLUMNS = Columns(WORKER_COLUMNS, RANK_COLUMNS, Point.__struct_fields__)


class Board:
    """The dashboard's state, read from the core without changing it.

    Times are arguments: `now_s` is monotonic, `at` is seconds since 1970. `decided`: returns the
    number of decisions so far, their prompt tokens, and those of these predicted to be cached.
    """

    def __init__(
        self,
        name: str,
        core: RouterCore,
        status: ServiceStatus,
        decided: Callable[[], tuple[int, int, int]],
        timeline: EventTimeline,
    ) -> None:
        self._name = name
        self._core = core
        self._status = status
        self._decided = decided
        self._timeline = timeline
        self.feed = DecisionFeed()
        self._table = Table(core, self.feed, timeline)
        self._seen: list[SeenDecision] = []
        self._history: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self._revision = 0
        self._number = 0
        self._mispredicted: list[Misprediction] = []
        self._counted: deque[tuple[float, int]] = deque()
        self._hits = HitWindow(0.0)
        self._placed = (0, 0)
        self._latencies: list[LatencyRow] = []
        self._totals: Totals | None = None
        self._fades_s = inf

    def sample(self, now_s: float, at: float) -> None:
        """Keep a sample, without a viewer: one that comes later gets the complete state.

        O(changes + ranks).
        """
        self._note(now_s, at)
        self._table.take_changed()
        self._table.take_gone()
        self._seen.clear()

    def decisions(self) -> bytes:
        """Return all remembered decisions, oldest first. O(decisions)."""
        return json.encode(list(self.feed.kept))

    def look(self, now_s: float) -> Iterator[None]:
        """Read changes of the core, in slices of a millisecond at most."""
        yield from self._table.look(now_s)
        self._look_at_findings(now_s)
        yield
        self._fades_s = min(self._fades_s, now_s + FADE_S)
        while (seen := self.feed.explain_next(self._core, now_s)) is not None:
            self._seen.append(seen)
            yield
        if now_s > self._fades_s:
            self._fades_s = now_s + FADE_S
            self.feed.prefixes.fade()

    def frame(self, now_s: float, at: float) -> bytes:
        """Return the changes since the last frame. O(changes + ranks)."""
        totals = self._note(now_s, at)
        workers, ranks = self._table.take_changed()
        gone_workers, gone_ranks = self._table.take_gone()
        events = list(self._timeline.since(self._revision))
        self._revision = max((each.revision for each in events), default=self._revision)
        seen, self._seen = self._seen, []
        self._number += 1
        self._latencies = self.feed.latencies.rows(now_s)
        return json.encode(
            Frame(
                number=self._number,
                at=at,
                totals=totals,
                workers=workers,
                ranks=ranks,
                gone_workers=gone_workers,
                gone_ranks=gone_ranks,
                decisions=seen,
                skipped=self.feed.skipped,
                events=events,
                prefixes=self._prefixes() if seen else None,
                mispredicted=self._mispredicted,
                history=[self._history[-1]],
                latencies=self._latencies,
            )
        )

    def whole(self, at: float) -> bytes:
        """Return the complete state as of the last frame, for a new viewer. O(ranks)."""
        assert self._totals is not None
        return json.encode(
            Frame(
                number=self._number,
                at=at,
                totals=self._totals,
                is_whole=True,
                router=self._name,
                version=version("kv-router"),
                columns=_COLUMNS,
                workers=list(self._table.workers.values()),
                ranks=list(self._table.ranks.values()),
                decisions=list(self.feed.kept)[-SHOWN:],
                skipped=self.feed.skipped,
                events=[e for e in self._timeline.since(0) if e.revision <= self._revision],
                prefixes=self._prefixes(),
                mispredicted=self._mispredicted,
                history=list(self._history),
                latencies=self._latencies,
            )
        )

    def _look_at_findings(self, now_s: float) -> None:
        """Record each new cause per model once in the timeline, for its widest scope."""
        known = {_scope_and_cause(each) for each in self._mispredicted}
        self._mispredicted = findings(self._core.closed_loop, now_s)[:MISPREDICTED]
        for each in self._mispredicted:
            if _scope_and_cause(each) not in known:
                known.add(_scope_and_cause(each))
                about = "" if each.worker_id is None else each.worker_id
                self._timeline.note("mispredicted", "warning", about, sentence(each))

    def _prefixes(self) -> Prefixes:
        return Prefixes(self.feed.prefixes.decisions, self.feed.prefixes.top(PREFIXES))

    def _predicted(self, prompt_tokens: int, predicted_tokens: int, now_s: float) -> float | None:
        """Return the recent hit rate that was predicted, given the totals so far."""
        before, self._placed = self._placed, (prompt_tokens, predicted_tokens)
        self._hits.note(prompt_tokens - before[0], predicted_tokens - before[1], None, now_s)
        return self._hits.predicted

    def _read_totals(self, now_s: float) -> Totals:
        core, status = self._core, self._status
        readiness = status.readiness(core)
        decisions, prompt_tokens, predicted_tokens = self._decided()
        predicted_hits = self._predicted(prompt_tokens, predicted_tokens, now_s)
        actual_hits, engine_tokens = self._table.actual_hits()
        unplaced_tokens = max(0.0, engine_tokens - self._hits.sent_tokens)
        return Totals(
            ready=readiness.is_ready,
            reasons=readiness.reasons,
            degraded=status.degraded(core),
            bus_connected=core.fleet.is_connected if status.has_bus else None,
            workers=len(core.fleet),
            schedulable_workers=core.fleet.schedulable_count(),
            ranks=len(core.ranks),
            active_requests=len(core.tracker),
            waiting_requests=len(core.waiting),
            decisions=decisions,
            prompt_tokens=prompt_tokens,
            predicted_cached_tokens=predicted_tokens,
            predicted_hits=predicted_hits,
            actual_hits=actual_hits,
            unplaced=fraction(unplaced_tokens, engine_tokens),
        )

    def _note(self, now_s: float, at: float) -> Totals:
        """Add a point to the history; return its totals."""
        totals = self._totals = self._read_totals(now_s)
        while self._history and self._history[0].at < at - HISTORY_S:
            self._history.popleft()
        self._history.append(self._point(totals, now_s, at))
        return totals

    def _point(self, totals: Totals, now_s: float, at: float) -> Point:
        counted = self._counted
        counted.append((now_s, totals.decisions))
        while len(counted) > 2 and counted[1][0] <= now_s - MEAN_S:
            counted.popleft()
        passed_s = now_s - counted[0][0]
        per_s = (totals.decisions - counted[0][1]) / passed_s if passed_s > 0 else 0.0
        return Point(
            round(at, 1),
            round(per_s, 2),
            totals.predicted_hits,
            totals.actual_hits,
            totals.active_requests,
            totals.waiting_requests,
            *self.feed.latencies.recent(now_s),
        )


def _scope_and_cause(found: Misprediction) -> tuple[str, str, str]:
    return found.model_name, found.routing_group, found.causes[0].name
