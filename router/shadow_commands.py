"""The commands of a router that only compares: it answers as it would, and books none of it."""

import time
from contextlib import suppress

from router.commands import Commands
from router.core import RouterCore
from router.errors import (
    DuplicateReservationError,
    TooManyReservationsError,
    WorkerNotFoundError,
)
from router.metrics import RouterMetrics
from router.outbox import Outbox
from router.placement import Placement
from router.protocol.replies import Decision
from router.protocol.requests import Incumbent, SelectRequest
from router.selections import Selections
from router.sequence.prompt import Prompt
from router.sequence.stages import Stages
from router.shadow import Shadow, ShadowReport, reserved_at
from router.watch import Watch, end_of


class ShadowCommands(Commands):
    """As `Commands`, but what is chosen here goes nowhere.

    `select_and_reserve` books the incumbent's choice where the request names it, and nothing
    otherwise; `reserve` books what the caller says it did.
    """

    def __init__(
        self,
        core: RouterCore,
        outbox: Outbox,
        metrics: RouterMetrics,
        shadow: Shadow,
        watch: Watch | None = None,
        selections: Selections | None = None,
    ) -> None:
        super().__init__(core, outbox, metrics, watch, selections)
        self._shadow = shadow

    def shadow_report(self) -> ShadowReport:
        """How our choices would have differed."""
        return self._shadow.report(time.monotonic())

    def _select(self, request: SelectRequest, prompt: Prompt, stages: Stages | None) -> Decision:
        """Choose a rank, and compare."""
        now_s = time.monotonic()
        placement = self.core.select(request, prompt, now_s)
        self._compare(request, placement)
        return self._selected(request, placement, stages, now_s)

    def _submit(self, request: SelectRequest, prompt: Prompt, stages: Stages | None) -> Decision:
        """Choose a rank, compare, and book what the incumbent chose; nothing waits."""
        placement = self.core.select(request, prompt, time.monotonic())
        self._compare(request, placement)
        end_of(stages)
        decision = self._booked(request, placement, stages)
        if request.incumbent is not None:
            self._book(request, request.incumbent, prompt)
        return decision

    def _compare(self, request: SelectRequest, placement: Placement) -> None:
        if request.incumbent is not None:
            rank, now_s = request.incumbent.rank, time.monotonic()
            self._shadow.compare(self.core, request, placement, rank, "request", now_s)

    def _book(self, request: SelectRequest, incumbent: Incumbent, prompt: Prompt) -> None:
        """What cannot be booked was compared all the same; its own messages may have booked it."""
        chosen = reserved_at(request, incumbent.rank)
        with suppress(WorkerNotFoundError, DuplicateReservationError, TooManyReservationsError):
            _, effects = self.core.reserve(chosen, prompt, time.monotonic())
            self._outbox.perform(effects)
