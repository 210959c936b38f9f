"""What operators see of effects: log lines, counters, and the time line of the dashboard."""

import logging

from router.effects import (
    Effect,
    ReplicaGone,
    RequestCheckpoint,
    ReservationExpired,
    UsageTold,
    WorkerGone,
)
from router.metrics import RouterMetrics
from router.protocol.values import Rank
from router.timeline import Severity, Timeline

log = logging.getLogger(__name__)

_ORDERED = ("unregistered", "withdrawn")
"""Why workers go when somebody wants it."""


class EffectNotes:
    """Notes effects as they happen; those that nobody has to see are passed over."""

    def __init__(self, metrics: RouterMetrics, timeline: Timeline) -> None:
        self._metrics = metrics
        self._timeline = timeline

    def note(self, effect: Effect) -> None:
        """Note an effect."""
        match effect:
            case RequestCheckpoint(rank, reason):
                log.info("asking %s for a checkpoint: %s", rank, reason)
                self._metrics.events.checkpoints_requested.labels(reason).inc()
                self._note_resync(rank, f"its agent is asked for a checkpoint: {reason}")
            case WorkerGone():
                self._note_worker_gone(effect)
            case ReplicaGone(router_id, dropped):
                log.warning("router %d is gone: silent (%d reservations)", router_id, dropped)
                self._count_dropped("router gone", dropped)
                text = f"router {router_id} fell silent, with {dropped} reservations"
                self._timeline.note("router_gone", "fault", "", text)
            case UsageTold(usage, predicted_tokens):
                self._metrics.usage.note(usage, predicted_tokens)
            case ReservationExpired(request_id, rank):
                log.info("reservation %s on %s expired", request_id, rank)
                self._count_dropped("expired", 1)
                text = "a reservation showed no progress and was freed"
                self._timeline.note("reservation_expired", "warning", rank, text)

    def note_retold(self, effect: RequestCheckpoint) -> None:
        """Note that an engine heard by this process is asked, rather than an agent."""
        text = f"its engine is asked for everything again: {effect.reason}"
        self._note_resync(effect.rank, text)

    def _note_worker_gone(self, gone: WorkerGone) -> None:
        is_ordered, dropped = gone.reason in _ORDERED, gone.dropped_reservations
        level = logging.INFO if is_ordered else logging.WARNING
        log.log(
            level, "worker %d is gone: %s (%d reservations)", gone.worker_id, gone.reason, dropped
        )
        self._metrics.events.workers_gone.labels(gone.reason).inc()
        self._count_dropped("worker gone", dropped)
        severity: Severity = "note" if is_ordered else "fault"
        text = f"gone: {gone.reason}{f', with {dropped} reservations' * bool(dropped)}"
        self._timeline.note("worker_gone", severity, gone.worker_id, text)

    def _note_resync(self, rank: Rank, text: str) -> None:
        self._timeline.note("resync", "warning", rank, text)

    def _count_dropped(self, why: str, reservations: int) -> None:
        self._metrics.events.reservations_dropped.labels(why).inc(reservations)
