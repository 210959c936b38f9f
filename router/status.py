"""Whether the process can be relied on, and what is wrong where it can't quite."""

from msgspec import Struct

from router.core import RouterCore


class Readiness(Struct, frozen=True):
    """`is_ready` with the reasons against it; `degraded`: what is wrong although we are ready."""

    is_ready: bool
    reasons: list[str]
    degraded: list[str]


class ServiceStatus:
    """Where the process stands; adapters set the fields, nobody else.

    `needs_workers`: with nobody to choose, the process is of no use; `initial_workers`: nor is it
    before there have been so many. Without a `nats_url` there is no bus, and only registered
    engines to catch up with.
    """

    __slots__ = (
        "_initial_workers",
        "_needs_workers",
        "answers_on_bus",
        "engines_caught_up",
        "events_caught_up",
        "is_draining",
        "nats_url",
        "registry_caught_up",
        "replicas_caught_up",
    )

    def __init__(self, nats_url: str, *, needs_workers: bool, initial_workers: int = 0) -> None:
        self._needs_workers = needs_workers
        self._initial_workers = initial_workers
        self.nats_url = nats_url
        self.is_draining = False
        self.answers_on_bus = True
        self.registry_caught_up = self.events_caught_up = not self.has_bus
        self.engines_caught_up = True
        self.replicas_caught_up = True

    @property
    def has_bus(self) -> bool:
        """Was a bus configured?"""
        return bool(self.nats_url)

    def readiness(self, core: RouterCore) -> Readiness:
        """Not ready until the index has once caught up and somebody can be chosen; later faults of
        the bus only degrade, since what is known still answers.
        """
        has_caught_up = self.registry_caught_up and self.events_caught_up
        reasons = self._missing(core)
        if not (reasons or self.answers_on_bus):
            reasons.append("commands on the bus are not answered yet")
        degraded = _degraded(core)
        if self.has_bus and not core.fleet.is_connected:
            text = f"not connected to NATS at {self.nats_url}"
            (degraded if has_caught_up else reasons).append(text)
        return Readiness(not reasons, reasons, degraded)

    def is_informed(self, core: RouterCore) -> bool:
        """Whether nothing but an answer on the bus is missing to be ready."""
        return not self._missing(core)

    def _missing(self, core: RouterCore) -> list[str]:
        reasons: list[str] = []
        if self.is_draining:
            reasons.append("draining")
        if not (self.registry_caught_up and self.events_caught_up):
            reasons.append("the index has not caught up with the event stream")
        if not self.engines_caught_up:
            reasons.append("the index has not caught up with the engines registered before")
        if not self.replicas_caught_up:
            reasons.append("the other routers' reservations are not known yet")
        if self._needs_workers:
            reasons += self._missing_workers(core.fleet.schedulable_count())
        return reasons

    def _missing_workers(self, schedulable: int) -> list[str]:
        """What keeps us from being ready; once there have been enough, one is enough."""
        if schedulable >= self._initial_workers:
            self._initial_workers = 0
        if not schedulable:
            return ["no schedulable workers"]
        wanted = self._initial_workers
        return [f"{schedulable} of {wanted} initial workers"] if wanted else []


def _degraded(core: RouterCore) -> list[str]:
    degraded = []
    if core.fleet.is_frozen:
        degraded.append("most workers fell silent together; none is taken out for now")
    unanswered = core.foreign.replicas.unanswered
    if unanswered:
        names = ", ".join(map(str, unanswered))
        degraded.append(f"routers that do not answer what they have booked: {names}")
    return degraded
