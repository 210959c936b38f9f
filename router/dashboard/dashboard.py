"""The dashboard of one router: its board, its streams and its pages."""

import time
from random import Random

from router.api.commands import Commands
from router.core.core import RouterCore
from router.core.placement import Placement
from router.dashboard.board.board import Board
from router.dashboard.handlers import Pages
from router.dashboard.streams import Streams
from router.dashboard.tokenizing import PromptTokenizer
from router.observability.decision_observer import DecisionObserver
from router.observability.event_timeline import EventTimeline
from router.observability.health import ServiceStatus
from router.observability.metrics import RouterMetrics
from router.protocol.requests import SelectRequest
from router.runtime.http_server.config import BodyConfig
from router.runtime.process.metrics import Rows, counter, expose, gauge

_STREAMS: Rows = {
    "streams": gauge("Connected dashboards", len),
    "streams_max": gauge("Limit of connected dashboards", "most"),
    "frames": counter("Frames sent to dashboards"),
    "frame_bytes": counter("Bytes of frames sent to dashboards"),
    "missed_frames": counter(
        "Frames that slow dashboards missed; the complete state follows", "missed"
    ),
    "seconds": counter("CPU time spent on frames and samples; at most 2 % of a core", "spent_s"),
}
_DECISIONS: Rows = {
    "shown_decisions": counter("Decisions sampled for the dashboard", "number"),
    "skipped_decisions": counter(
        "Decisions not sampled while a dashboard was connected", "skipped"
    ),
}


class Dashboard:
    """The dashboard; `streams` is to be run and closed, `pages` to be served."""

    def __init__(
        self,
        name: str,
        bodies: BodyConfig,
        max_streams: int,
        core: RouterCore,
        status: ServiceStatus,
        metrics: RouterMetrics,
        timeline: EventTimeline,
        commands: Commands,
        watch: DecisionObserver,
    ) -> None:
        self._board = Board(name, core, status, lambda: metrics.decisions.totals, timeline)
        self._watch = watch
        self.streams = Streams(self._board, max_streams, self._attend)
        if max_streams:
            latencies = self._board.feed.latencies
            watch.onlooker, watch.on_report = self._take, latencies.report
            watch.followed = latencies.followed
        tokenizer, decisions = PromptTokenizer(core, Random()), self._board.decisions
        self.pages = Pages(bodies, commands, self.streams, decisions, tokenizer, metrics)
        expose(metrics.registry, "kv_router_dashboard_", _STREAMS, self.streams)
        expose(metrics.registry, "kv_router_dashboard_", _DECISIONS, self._board.feed)

    def _attend(self, *, is_watched: bool) -> None:
        self._board.feed.watch(is_watched=is_watched)
        self._watch.look_again()

    def _take(self, command: str, request: SelectRequest, placement: Placement) -> float:
        return self._board.feed.take(command, request, placement, time.monotonic(), time.time())
