"""A step of commands in a router that only compares: its own choices are not reserved."""

import time
from contextlib import suppress

from router.core.commands import Reserve, Select, Submit
from router.core.core import RouterCore
from router.core.errors import TooManyReservationsError
from router.core.placement import Placement
from router.core.views.shadow import Shadow, ShadowReport, reserved_at
from router.errors import WorkerNotFoundError
from router.ingest.effect_runner import EffectRunner
from router.sequence.active.errors import DuplicateReservationError


class ShadowStep:
    """A step that submits nothing, compares, and reserves the incumbent's choice if it is named."""

    def __init__(self, core: RouterCore, effect_runner: EffectRunner, shadow: Shadow) -> None:
        self._core = core
        self._effect_runner = effect_runner
        self._shadow = shadow

    def report(self) -> ShadowReport:
        """Return how our choices would have differed."""
        return self._shadow.report(time.monotonic())

    def before(self, command: Select | Submit) -> Select:
        """Return the selection in place of a command; no request waits."""
        return Select(command.request, command.prompt)

    def after(self, command: Select | Submit, placement: Placement) -> None:
        """Compare our choice with the incumbent's; reserve the latter for a submitted request.

        The reservation is left out if it fails, or if the incumbent's own messages made it.
        """
        request, now_s = command.request, time.monotonic()
        if request.incumbent is None:
            return
        rank = request.incumbent.rank
        self._shadow.compare(self._core, request, placement, rank, "request", now_s)
        if isinstance(command, Select):
            return
        chosen = Reserve(reserved_at(request, rank), command.prompt)
        with suppress(WorkerNotFoundError, DuplicateReservationError, TooManyReservationsError):
            _, effects = self._core.handle(chosen, now_s)
            self._effect_runner.perform(effects)
