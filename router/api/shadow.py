"""Steps of commands that compare choices: another router's, or those of a second policy."""

import time
from contextlib import suppress
from random import Random
from typing import Protocol

from router.core.commands import Reserve, Select, Submit
from router.core.core import RouterCore
from router.core.errors import TooManyReservationsError
from router.core.placement import Placement
from router.core.views.shadow import Shadow, ShadowReport, reserved_at
from router.errors import KvRouterError, WorkerNotFoundError
from router.ingest.effect_runner import EffectRunner
from router.sequence.active.errors import DuplicateReservationError


class ShadowStep(Protocol):
    """A step before and after the core, which compares."""

    def report(self) -> ShadowReport:
        """Return how the choices would have differed."""

    def before(self, command: Select | Submit) -> Select | Submit:
        """Return the command to be handled in place of one."""

    def after(self, command: Select | Submit, placement: Placement) -> None:
        """Compare with a placement, made at once."""


class RouterShadowStep:
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


class PolicyShadowStep:
    """A step that has a second policy choose as well, before the choice in force is booked.

    Not compared: requests that name a policy or a rank, and those that wait in the queue, which are
    placed at another moment.
    """

    def __init__(self, core: RouterCore, shadow: Shadow, policy: str, rng: Random) -> None:
        self._core = core
        self._shadow = shadow
        self._policy = policy
        self._rng = rng
        self._weighed: Placement | None = None

    def report(self) -> ShadowReport:
        """Return how the second policy's choices would have differed."""
        return self._shadow.report(time.monotonic())

    def before(self, command: Select | Submit) -> Select | Submit:
        """Return the command itself, once the second policy has chosen."""
        self._weighed = None
        request, override = command.request, command.request.router_config_override
        is_named = override is not None and override.policy is not None
        if command.prompt is not None and not is_named and request.pinned_worker is None:
            now_s = time.monotonic()
            with suppress(KvRouterError):  # its own refusal; the command meets it again
                self._weighed = self._core.place_under(
                    self._policy, request, command.prompt, now_s, self._rng
                )
        return command

    def after(self, command: Select | Submit, placement: Placement) -> None:
        """Compare the second policy's choice with that in force."""
        if self._weighed is not None:
            self._shadow.compare(
                self._core,
                command.request,
                self._weighed,
                placement.rank,
                "policy",
                time.monotonic(),
            )
