"""Log lines, counters and dashboard events of effects."""

import logging

from router.core.effects import (
    Effect,
    ReplicaGone,
    RequestCheckpoint,
    ReservationExpired,
    UsageTold,
    WorkerGone,
)
from router.observability.event_timeline import EventTimeline, Severity
from router.observability.metrics import RouterMetrics
from router.protocol.values import Rank

log = logging.getLogger(__name__)

_ORDERED = ("unregistered", "withdrawn")
"""Reasons of a removal that an operator or the worker itself requested."""


class EffectLog:
    """A log of effects; effects of no interest to operators are skipped."""

    def __init__(self, metrics: RouterMetrics, timeline: EventTimeline) -> None:
        self._metrics = metrics
        self._timeline = timeline

    def note(self, effect: Effect) -> None:
        """Log and count an effect."""
        match effect:
            case RequestCheckpoint(rank, reason):
                log.info("requested a checkpoint of %s: %s", rank, reason)
                self._metrics.checkpoints_requested.labels(reason).inc()
                self._note_resync(rank, f"requested a checkpoint from its agent: {reason}")
            case WorkerGone():
                self._note_worker_gone(effect)
            case ReplicaGone(router_id, dropped):
                log.warning(
                    "router %d removed: silent (%d reservations dropped)", router_id, dropped
                )
                self._count_dropped("router gone", dropped)
                text = f"router {router_id} is silent; {dropped} of its reservations dropped"
                self._timeline.note("router_gone", "fault", "", text)
            case UsageTold(usage, predicted_tokens):
                self._metrics.note_usage(usage, predicted_tokens)
            case ReservationExpired(request_id, rank):
                log.info("reservation %s on %s expired", request_id, rank)
                self._count_dropped("expired", 1)
                text = "a reservation without progress expired and was freed"
                self._timeline.note("reservation_expired", "warning", rank, text)

    def note_retold(self, effect: RequestCheckpoint) -> None:
        """Record a resync from an engine that this process reads itself, without an agent."""
        text = f"requested all blocks from its engine again: {effect.reason}"
        self._note_resync(effect.rank, text)

    def _note_worker_gone(self, gone: WorkerGone) -> None:
        is_ordered, dropped = gone.reason in _ORDERED, gone.dropped_reservations
        level = logging.INFO if is_ordered else logging.WARNING
        log.log(
            level,
            "worker %d removed: %s (%d reservations dropped)",
            gone.worker_id,
            gone.reason,
            dropped,
        )
        self._metrics.workers_gone.labels(gone.reason).inc()
        self._count_dropped("worker gone", dropped)
        severity: Severity = "note" if is_ordered else "fault"
        text = f"removed: {gone.reason}{f', {dropped} reservations dropped' * bool(dropped)}"
        self._timeline.note("worker_gone", severity, gone.worker_id, text)

    def _note_resync(self, rank: Rank, text: str) -> None:
        self._timeline.note("resync", "warning", rank, text)

    def _count_dropped(self, why: str, reservations: int) -> None:
        self._metrics.reservations_dropped.labels(why).inc(reservations)
