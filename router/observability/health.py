"""The readiness of the process, and its faults."""

from collections.abc import Callable
from itertools import islice

from msgspec import Struct

from router.core.core import RouterCore
from router.core.views.faults import faults
from router.protocol.replicas import PeerView
from router.runtime.process.redaction import redact


class Readiness(Struct, frozen=True):
    """`is_ready`, with the reasons against it."""

    is_ready: bool
    reasons: list[str]


class ServiceStatus:
    """The state of the process; only adapters set the fields.

    `needs_workers`: the process is not ready without a schedulable worker; `initial_workers`: the
    number of schedulable workers required before it is ready for the first time. Without a
    `nats_url` there is no bus, and only registered engines have to catch up; it is kept without its
    secrets. `cluster_problem`: returns why the engines of a cluster are not known. `peers`: returns
    the other routers without a bus; `peer_problems`: sentences about those that share nothing.
    """

    __slots__ = (
        "_initial_workers",
        "_needs_workers",
        "answers_on_bus",
        "cluster_problem",
        "engines_caught_up",
        "events_caught_up",
        "is_draining",
        "nats_url",
        "peer_problems",
        "peers",
        "registry_caught_up",
        "replicas_caught_up",
    )

    def __init__(self, nats_url: str, *, needs_workers: bool, initial_workers: int = 0) -> None:
        self._needs_workers = needs_workers
        self._initial_workers = initial_workers
        self.nats_url = redact(nats_url)
        self.is_draining = False
        self.answers_on_bus = True
        self.registry_caught_up = self.events_caught_up = not self.has_bus
        self.engines_caught_up = True
        self.replicas_caught_up = True
        self.cluster_problem: Callable[[], str | None] = lambda: None
        self.peers: Callable[[], list[PeerView]] = list
        self.peer_problems: Callable[[], list[str]] = list

    @property
    def has_bus(self) -> bool:
        """True if a bus is configured."""
        return bool(self.nats_url)

    def readiness(self, core: RouterCore) -> Readiness:
        """Return the readiness of the process. O(1) unless the set of workers has changed.

        It is not ready until the index has caught up once and a worker can be chosen. Later faults
        of the bus only degrade it, because the last known state still serves requests.
        """
        reasons = self._missing(core)
        if not (reasons or self.answers_on_bus):
            reasons.append("commands on the bus are not served yet")
        if not self._has_caught_up:
            reasons += self._bus_problems(core)
        return Readiness(not reasons, reasons)

    def degraded(self, core: RouterCore) -> list[str]:
        """Return the faults that do not affect readiness. O(routers and faulty workers)."""
        bus = self._bus_problems(core) if self._has_caught_up else ()
        return [*_degraded(core), *self.peer_problems(), *bus, *faults(core)]

    @property
    def _has_caught_up(self) -> bool:
        return self.registry_caught_up and self.events_caught_up

    def _bus_problems(self, core: RouterCore) -> list[str]:
        is_away = self.has_bus and not core.fleet.is_connected
        return [f"not connected to NATS at {self.nats_url}"] if is_away else []

    def is_informed(self, core: RouterCore) -> bool:
        """Return whether the process is ready, apart from responding on the bus."""
        return not self._missing(core)

    def _missing(self, core: RouterCore) -> list[str]:
        reasons: list[str] = []
        if self.is_draining:
            reasons.append("draining")
        if not self._has_caught_up:
            reasons.append("the index has not caught up with the event stream")
        if not self.engines_caught_up:
            reasons.append("the index has not caught up with the engines registered before")
        if not self.replicas_caught_up:
            reasons.append("the other routers' reservations are not known yet")
        if problem := self.cluster_problem():
            reasons.append(problem)
        elif self._needs_workers:
            reasons += self._missing_workers(core)
        return reasons

    def _missing_workers(self, core: RouterCore) -> list[str]:
        """Return reasons against readiness; after enough workers were seen once, one suffices.

        None is needed where requests wait for the first one: else none would ever be sent.
        """
        schedulable = core.fleet.schedulable_count()
        if schedulable >= self._initial_workers:
            self._initial_workers = 0
        if not schedulable and core.may_wait_for_workers:
            return []
        if not schedulable:
            return ["no schedulable workers"]
        wanted = self._initial_workers
        return [f"{schedulable} of {wanted} initial workers"] if wanted else []


def _degraded(core: RouterCore) -> list[str]:
    degraded = []
    if not core.fleet.schedulable_count() and core.may_wait_for_workers:
        degraded.append("no schedulable workers; requests wait for one")
    if core.fleet.is_frozen:
        degraded.append("most workers became silent at once; none is removed for now")
    unanswered = core.foreign.replicas.unanswered
    if unanswered:
        names = ", ".join(map(str, unanswered))
        degraded.append(f"routers that do not report their reservations: {names}")
    for (router_id, worker_id), (there, here) in islice(core.foreign.differing.items(), 3):
        degraded.append(
            f"worker {worker_id} has blocks of {there} tokens at router {router_id}, of {here} here"
        )
    return degraded
