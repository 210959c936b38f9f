"""Timers of the stages of a decision. The caller provides the clock."""

from collections.abc import Callable

BLOCK_HASHING, SEQUENCE_HASHING, FIND, SCHEDULING = range(4)
STAGES = ("block_hashing", "sequence_hashing", "find", "scheduling")


class Stages:
    """The seconds spent in each stage of one decision; a stage may occur more than once.

    Timing begins at creation. The time between the end of a stage and the next `resume` belongs to
    no stage: the decision waited for a thread or for the event loop. `is_counted`: the metrics show
    these times; `is_traced`: so does a trace.
    """

    __slots__ = ("_clock", "_since_s", "begun_s", "is_counted", "is_traced", "seconds", "waited_s")

    def __init__(
        self, clock: Callable[[], float], *, is_counted: bool = True, is_traced: bool = False
    ) -> None:
        self._clock = clock
        self.is_counted, self.is_traced = is_counted, is_traced
        self.seconds = [0.0, 0.0, 0.0, 0.0]
        self.begun_s = self._since_s = clock()
        self.waited_s = 0.0

    def end(self, stage: int) -> None:
        """Add the time since the last end or `resume` to a stage."""
        now_s = self._clock()
        self.seconds[stage] += now_s - self._since_s
        self._since_s = now_s

    def admitted(self) -> None:
        """Add the time since the last stage to the queueing time, which no stage includes."""
        before_s = self._since_s
        self.resume()
        self.waited_s += self._since_s - before_s

    def resume(self) -> None:
        """Restart timing after a wait."""
        self._since_s = self._clock()

    @property
    def total_s(self) -> float:
        """Seconds from creation to the end of the last stage, waits included."""
        return self._since_s - self.begun_s
