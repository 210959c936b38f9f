"""The busy time that an engine reports, corrected by the router's clock.

An engine that has a request throughout an interval is busy throughout. Over such intervals the busy
time that it reports and the time that passed agree, unless it measures its time wrongly, or only
part of it; the factor between the two is removed before anything is learned.
"""

import math

from router.protocol.loads import LoadCounters, LoadGauges
from router.scheduler.predictor._rates_kernel import MOST_STEP

MEMORY_S = 60.0
"""Time constant of the sums: a step that a report divides, which counts in one interval too many or
too few, is little beside it."""

BELIEVED_S = 2.0
"""The work for which a new engine counts as exact: as long as a few steps of a long prompt."""

EXACT_WITHIN = 1.25
"""Factor between the two sums up to which the engine counts as exact. Steps that reports divide
differ more from interval to interval than between engines: to follow them made honest reports
worse (mean end to end by 2 % at speed 2.2)."""

MOST = 1e6
"""Limit of the factor: that of microseconds taken for seconds."""


class BusyClock:
    """The sums of the reported and of the passed time, over intervals of uninterrupted work.

    `_ratio`: of the passed to the reported time. `_open_s`: time that passed since the last
    completed step, which is not reported yet. `_is_begun`: the work went on before that step; the
    first steps of a burst compute its prompt, and last longer than others.
    """

    __slots__ = ("_is_begun", "_open_s", "_passed_s", "_ratio", "_reported_s")

    def __init__(self) -> None:
        self._ratio = 1.0
        self._is_begun = False
        self._open_s = 0.0
        self._passed_s = self._reported_s = BELIEVED_S

    def note(self, before: LoadGauges, counted: LoadCounters, elapsed_s: float) -> None:
        """Add an interval: the gauges at its beginning, and what was counted in it.

        Some request was there throughout if fewer ended than were there at its beginning, and the
        engine went on if each step had a request that decoded. One report is believed within a
        factor of MOST_STEP.
        """
        is_one_throughout = counted.requests_finished < before.running_requests
        if not is_one_throughout or counted.decode_requests < counted.steps:
            self.skip()
            return
        self._open_s += elapsed_s
        if counted.steps and self._is_begun:
            self._add(self._open_s, counted.busy_s)
        if counted.steps:
            self._is_begun, self._open_s = True, 0.0

    def skip(self) -> None:
        """Leave out an interval that cannot be compared."""
        self._is_begun, self._open_s = False, 0.0

    def _add(self, passed_s: float, reported_s: float) -> None:
        usual_s = passed_s / self._ratio
        believed_s = min(max(reported_s, usual_s / MOST_STEP), usual_s * MOST_STEP)
        kept = math.exp(-passed_s / MEMORY_S)
        self._passed_s = kept * self._passed_s + passed_s
        self._reported_s = kept * self._reported_s + believed_s
        self._ratio = min(max(self._passed_s / self._reported_s, 1 / MOST), MOST)

    @property
    def factor(self) -> float:
        """The time that passes while the engine reports a second of work; 1 if it may be exact."""
        is_exact = 1 / EXACT_WITHIN < self._ratio < EXACT_WITHIN
        return 1.0 if is_exact else self._ratio
