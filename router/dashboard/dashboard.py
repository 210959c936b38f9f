"""The dashboard of one router: its board, who watches it, and its pages."""

import time
from random import Random

from router.commands import Commands
from router.config import RouterConfig
from router.core import RouterCore
from router.dashboard.board import Board
from router.dashboard.handlers import Pages
from router.dashboard.metrics import DashboardCollector
from router.dashboard.streams import Streams
from router.dashboard.tokenizing import Tokenizing
from router.metrics import RouterMetrics
from router.placement import Placement
from router.protocol.requests import SelectRequest
from router.status import ServiceStatus
from router.timeline import Timeline
from router.watch import Watch


class Dashboard:
    """`streams` is to be run, and closed; `pages` to be served."""

    def __init__(
        self,
        config: RouterConfig,
        core: RouterCore,
        status: ServiceStatus,
        metrics: RouterMetrics,
        timeline: Timeline,
        commands: Commands,
        watch: Watch,
    ) -> None:
        self._board = Board(config.name, core, status, lambda: metrics.decisions.totals, timeline)
        self._watch = watch
        self.streams = Streams(self._board, config.max_dashboard_streams, self._attend)
        self.pages = Pages(config, commands, self.streams, Tokenizing(core, Random()), metrics)
        metrics.registry.register(DashboardCollector(self.streams, self._board.feed))

    def _attend(self, *, is_watched: bool) -> None:
        """Decisions are taken while somebody watches."""
        self._watch.onlooker = self._take if is_watched else None

    def _take(self, command: str, request: SelectRequest, placement: Placement) -> None:
        self._board.feed.take(command, request, placement, time.monotonic(), time.time())
