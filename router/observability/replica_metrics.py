"""Metrics of replica sync."""

from typing import Annotated

from prometheus_client import CollectorRegistry, Counter

from router.core.core import RouterCore
from router.runtime.process.metrics import Event, Rows, counter, expose, gauge, make_metrics

_COUNTS = "foreign.replicas.counts."
_METRICS: Rows = {
    "known": gauge("Other routers that are alive", lambda core: len(core.foreign.replicas)),
    "in_doubt": gauge(
        "Of those, routers with missing data", lambda core: len(core.foreign.replicas.in_doubt)
    ),
    "reservations": gauge("Reservations of other routers, counted here", "tracker.foreign_count"),
    "unplaced": gauge(
        "Reservations of other routers that are not: on unknown ranks, or beyond max_reservations",
        "foreign.",
    ),
    "yielded": counter("Reservations that another router took over", "foreign."),
    "inherited": counter("Reservations taken over from routers that stopped", "foreign."),
    "reservations_refused": counter(
        "Others' reservations beyond max_reservations", "foreign.refused"
    ),
    "frames_applied": counter("Frames applied, in order", f"{_COUNTS}frames.applied"),
    "frames_doubled": counter("Frames received twice", f"{_COUNTS}frames.doubled"),
    "frames_missing": counter("Times that frames were missing", f"{_COUNTS}frames.missing"),
    "differences": counter("Times that a digest differed", f"{_COUNTS}frames.differing"),
    "catch_ups": counter("Snapshots applied", f"{_COUNTS}frames.snapshots"),
    "gone": counter("Routers removed as silent", _COUNTS),
    "refused": counter("Messages of routers beyond the limit", _COUNTS),
    "stale": counter("Messages of an earlier incarnation of a router", _COUNTS),
}


class ReplicaMetrics:
    """Counters that the adapter updates, beside values read from the core."""

    frames_sent: Annotated[Counter, Event("Frames sent")]
    frames_lost: Annotated[Counter, Event("Frames with changes that could not be sent")]
    bytes_sent: Annotated[Counter, Event("Bytes of frames sent")]
    snapshots_sent: Annotated[Counter, Event("Snapshots sent to other routers")]
    messages: Annotated[Counter, Event("Messages of other routers", ("kind",))]

    def __init__(self, core: RouterCore, registry: CollectorRegistry) -> None:
        prefix = "kv_router_replica_"
        make_metrics(self, registry, prefix)
        expose(registry, prefix, _METRICS, core)
