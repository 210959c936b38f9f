"""What is noted of decisions: all are counted, some timed, and some written down where wanted."""

import time
from typing import TYPE_CHECKING

from router.decision_log import DecisionLog
from router.decision_metrics import DecisionMetrics
from router.placement import Placement
from router.protocol.replies import Decision
from router.protocol.requests import SelectRequest
from router.sequence.stages import SCHEDULING, Stages, TracedStages

if TYPE_CHECKING:  # the extra `otel` may not be installed
    from router.tracing import Tracer

TIMED_EVERY = 32
"""Of so many decisions one is timed: such a one goes the general way, which takes 15 µs more."""


class Watch:
    """Watches the decisions of one set of commands."""

    def __init__(
        self,
        metrics: DecisionMetrics,
        decision_log: DecisionLog | None = None,
        tracer: "Tracer | None" = None,
    ) -> None:
        self._metrics = metrics
        self._log = decision_log
        self._tracer = tracer
        self._turn = 0

    def begin(self) -> Stages | None:
        """A request came. None: this one is not timed."""
        if self._tracer is not None and self._tracer.wants_this():
            return TracedStages(time.perf_counter)
        self._turn -= 1
        if self._turn >= 0:
            return None
        self._turn = TIMED_EVERY - 1
        return Stages(time.perf_counter)

    def decided(
        self,
        command: str,
        request: SelectRequest,
        placement: Placement,
        decision: Decision,
        stages: Stages | None,
    ) -> None:
        """A request was placed. `stages`: None where it was not timed."""
        role, cached_blocks = placement.worker.role, decision.predicted_cached_blocks
        cached_tokens = cached_blocks * decision.block_size
        self._metrics.note(
            command,
            role,
            decision.isl_tokens,
            cached_tokens,
            stages,
            has_source=decision.source is not None,
        )
        if self._log is not None:
            self._log.take(request, placement)
        if self._tracer is not None and isinstance(stages, TracedStages):
            self._tracer.tell(command, decision, stages)


def end_of(stages: Stages | None) -> None:
    """A request is placed and booked: its last stage ended."""
    if stages is not None:
        stages.end(SCHEDULING)
