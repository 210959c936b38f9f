"""Observation of decisions: all are counted; some are timed, logged or traced."""

import time
from collections.abc import Callable, Container
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from router.core.commands import Free, OutputBlock, PrefillComplete
from router.core.placement import Placement
from router.observability.decision_log import DecisionLog
from router.observability.decision_metrics import DecisionTotals
from router.protocol.replies import Decision
from router.protocol.requests import SelectRequest
from router.sequence.active.stages import Stages

if TYPE_CHECKING:  # the extra `otel` may not be installed
    from router.observability.tracing import Tracer

TIMED_EVERY, TIMED_APART_S = 32, 0.1
"""One of `TIMED_EVERY` decisions is timed, at most one per `TIMED_APART_S` seconds.

A timed decision reads the clock a few times, and hashes in two steps, which adds 5 µs.
"""

Onlooker: TypeAlias = Callable[[str, SelectRequest, Placement], float]
"""A callback for decisions: command, request, placement. It neither waits nor raises, and returns
for how many seconds it wants no other one."""

Reports: TypeAlias = Callable[[PrefillComplete | OutputBlock | Free, float], None]
"""A callback for what callers report of requests, and when. It neither waits nor raises."""


class DecisionObserver:
    """The observer of one set of commands.

    `onlooker`: receives decisions, if set; `on_report`: accepted reports of the requests in
    `followed`. Both are looked for without a call, as nearly all decisions are in no sample.
    """

    def __init__(
        self,
        metrics: DecisionTotals,
        decision_log: DecisionLog | None = None,
        tracer: "Tracer | None" = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._metrics = metrics
        self._log = decision_log
        self._tracer = tracer
        self._clock = clock
        self.onlooker: Onlooker | None = None
        self.on_report: Reports | None = None
        self.followed: Container[str] = ()
        self._wanted_s = -inf
        self._turn = 0
        self._timed_s = -inf

    def begin(self) -> Stages | None:
        """Begin to observe a request. Returns None if it is neither timed nor traced."""
        self._turn -= 1
        is_counted = self._turn < 0 and self._is_due()
        is_traced = self._tracer is not None and self._tracer.wants_this()
        if not is_counted and not is_traced:
            return None
        return Stages(self._clock, is_counted=is_counted, is_traced=is_traced)

    def decided(
        self,
        command: str,
        request: SelectRequest,
        placement: Placement,
        decision: Decision,
        stages: Stages | None,
    ) -> None:
        """Record a decision. `stages`: None if it was not timed."""
        role, cached_blocks = placement.worker.role, decision.predicted_cached_blocks
        cached_tokens = cached_blocks * decision.block_size
        self._metrics.note(
            command,
            role,
            decision.isl_tokens,
            cached_tokens,
            stages if stages is not None and stages.is_counted else None,
            has_source=decision.source is not None,
        )
        if self._log is not None:
            self._log.take(request, placement)
        if self.onlooker is not None:
            now_s = self._clock()
            if now_s >= self._wanted_s:
                self._wanted_s = now_s + self.onlooker(command, request, placement)
        if self._tracer is not None and stages is not None and stages.is_traced:
            self._tracer.record(command, decision, stages)

    def look_again(self) -> None:
        """Show the onlooker the next decision, whenever it wanted one."""
        self._wanted_s = -inf

    def _is_due(self) -> bool:
        """Return whether a request is to be timed; False soon after the last."""
        self._turn = TIMED_EVERY - 1
        now_s = self._clock()
        if now_s < self._timed_s + TIMED_APART_S:
            return False
        self._timed_s = now_s
        return True
