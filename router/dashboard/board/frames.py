"""The messages to the page: first the complete state, then changes once a second."""

from msgspec import Struct

from router.core.views.accuracy import Misprediction
from router.dashboard.board.decision_feed import SeenDecision
from router.dashboard.board.hot_prefixes import HotPrefix
from router.dashboard.board.latency import LatencyRow
from router.dashboard.board.table import RankRow, WorkerRow
from router.observability.event_timeline import TimelineEntry


class Totals(Struct, frozen=True):
    """The state of the whole router; counters since its start, hit rates as in `RankRow`."""

    ready: bool
    reasons: list[str]
    degraded: list[str]
    bus_connected: bool | None
    workers: int
    schedulable_workers: int
    ranks: int
    active_requests: int
    waiting_requests: int
    decisions: int
    prompt_tokens: int
    predicted_cached_tokens: int
    predicted_hits: float | None
    actual_hits: float | None
    unplaced: float | None
    """The recent fraction of the engines' prompt tokens that this router did not place."""


class Point(Struct, frozen=True, array_like=True):
    """One sample of the history, for the curves."""

    at: float
    decisions_per_s: float
    predicted_hits: float | None
    actual_hits: float | None
    active_requests: int
    waiting_requests: int
    ttft_s: float | None
    predicted_ttft_s: float | None


class Prefixes(Struct, frozen=True):
    """The hottest prefixes among `decisions` sampled decisions."""

    decisions: int
    top: list[HotPrefix]


class Columns(Struct, frozen=True):
    """The names of the columns of each kind of row."""

    workers: tuple[str, ...]
    ranks: tuple[str, ...]
    history: tuple[str, ...]


class Frame(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A message to the page.

    `is_whole`: True if the frame replaces all earlier state; otherwise it contains the changes
    since the last frame. Lines replace those of the same worker or rank. `mispredicted` and
    `latencies` are complete in every frame. `skipped`: decisions not shown since the start.
    """

    number: int
    at: float
    totals: Totals
    is_whole: bool = False
    router: str = ""
    version: str = ""
    columns: Columns | None = None
    workers: list[WorkerRow] = []
    ranks: list[RankRow] = []
    gone_workers: list[str] = []
    gone_ranks: list[tuple[str, int]] = []
    decisions: list[SeenDecision] = []
    skipped: int = 0
    events: list[TimelineEntry] = []
    prefixes: Prefixes | None = None
    mispredicted: list[Misprediction] = []
    history: list[Point] = []
    latencies: list[LatencyRow] = []
