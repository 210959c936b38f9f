"""What is noted of decisions: all are counted, some timed, and some written down where wanted."""

import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from router.decision_log import DecisionLog
from router.decision_metrics import DecisionMetrics
from router.placement import Placement
from router.protocol.replies import Decision
from router.protocol.requests import SelectRequest
from router.sequence.stages import SCHEDULING, Stages, TracedStages

if TYPE_CHECKING:  # the extra `otel` may not be installed
    from router.tracing import Tracer

TIMED_EVERY, TIMED_APART_S = 32, 0.1
"""Of so many decisions one is timed, and of many in a second 10: such a one goes the general way,
which takes 15 µs more, and seldom taken three times that, as all that it touches is cold.
"""

Onlooker: TypeAlias = Callable[[str, SelectRequest, Placement], None]
"""Is told of a decision: by which command, of what, and where it went. Neither waits nor raises."""


class Watch:
    """Watches the decisions of one set of commands. `onlooker`: is shown each; None: nobody."""

    def __init__(
        self,
        metrics: DecisionMetrics,
        decision_log: DecisionLog | None = None,
        tracer: "Tracer | None" = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._metrics = metrics
        self._log = decision_log
        self._tracer = tracer
        self._clock = clock
        self.onlooker: Onlooker | None = None
        self._turn = 0
        self._timed_s = -inf

    def begin(self) -> Stages | None:
        """A request came. None: this one is not timed."""
        if self._tracer is not None and self._tracer.wants_this():
            return TracedStages(self._clock)
        self._turn -= 1
        return self._timed() if self._turn < 0 else None

    def begin_plain(self) -> bool:
        """A request came that asks for a rank only. False: somebody looks at it, or it is timed, so
        that it has to `begin`.
        """
        if self._log is not None or self._tracer is not None or self.onlooker is not None:
            return False
        if self._turn <= 0 and self._clock() >= self._timed_s + TIMED_APART_S:
            return False
        self._turn = (self._turn if self._turn > 0 else TIMED_EVERY) - 1
        return True

    def decided_plain(self, command: str, role: str, decision: Decision) -> None:
        """It was placed at a worker of this role."""
        cached_tokens = decision.predicted_cached_blocks * decision.block_size
        self._metrics.note(
            command,
            role,
            decision.isl_tokens,
            cached_tokens,
            None,
            has_source=decision.source is not None,
        )

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
        if self.onlooker is not None:
            self.onlooker(command, request, placement)
        if self._tracer is not None and isinstance(stages, TracedStages):
            self._tracer.tell(command, decision, stages)

    def _timed(self) -> Stages | None:
        """Its turn has come, unless the last one is not long ago."""
        self._turn = TIMED_EVERY - 1
        now_s = self._clock()
        if now_s < self._timed_s + TIMED_APART_S:
            return None
        self._timed_s = now_s
        return Stages(self._clock)


def end_of(stages: Stages | None) -> None:
    """A request is placed and booked: its last stage ended."""
    if stages is not None:
        stages.end(SCHEDULING)
