"""What the page is told: first everything, then once a second what has changed."""

from msgspec import Struct

from router.dashboard.decision_feed import SeenDecision
from router.dashboard.hot_prefixes import HotPrefix
from router.dashboard.lines import RankLine, WorkerLine
from router.prediction_views import Misprediction
from router.timeline import Happened


class Totals(Struct, frozen=True):
    """The whole router at a moment. Counters are since its start; hit rates as of `RankLine`."""

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


class Point(Struct, frozen=True, array_like=True):
    """A second of the past, for the curves."""

    at: float
    decisions_per_s: float
    predicted_hits: float | None
    actual_hits: float | None
    active_requests: int
    waiting_requests: int


class Prefixes(Struct, frozen=True):
    """The hottest prefixes among so many sampled decisions."""

    decisions: int
    top: list[HotPrefix]


class Columns(Struct, frozen=True):
    """What the places in a line mean."""

    workers: tuple[str, ...]
    ranks: tuple[str, ...]
    history: tuple[str, ...]


class Frame(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`is_whole`: everything, whatever was known before; else what is new since the last frame.

    Lines replace those of the same worker or rank; `mispredicted` is all of it, in every frame.
    `skipped`: decisions not shown since the start.
    """

    number: int
    at: float
    totals: Totals
    is_whole: bool = False
    router: str = ""
    version: str = ""
    columns: Columns | None = None
    workers: list[WorkerLine] = []
    ranks: list[RankLine] = []
    gone_workers: list[str] = []
    gone_ranks: list[tuple[str, int]] = []
    decisions: list[SeenDecision] = []
    skipped: int = 0
    events: list[Happened] = []
    prefixes: Prefixes | None = None
    mispredicted: list[Misprediction] = []
    history: list[Point] = []
