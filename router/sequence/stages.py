"""How long each stage of a decision takes, by a clock that is its adapter's business."""

from collections.abc import Callable

BLOCK_HASHING, SEQUENCE_HASHING, FIND, SCHEDULING = range(4)
STAGES = ("block_hashing", "sequence_hashing", "find", "scheduling")


class Stages:
    """The seconds that went into each stage of one decision; a stage may come more than once.

    Begins when it is made. What passes between a `resume` and the stage ended before it is no
    stage's: a thread or the loop was waited for.
    """

    __slots__ = ("_clock", "_since_s", "begun_s", "seconds", "waited_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds = [0.0, 0.0, 0.0, 0.0]
        self.begun_s = self._since_s = clock()
        self.waited_s = 0.0

    def end(self, stage: int) -> None:
        """What passed since the last one ended was this stage."""
        now_s = self._clock()
        self.seconds[stage] += now_s - self._since_s
        self._since_s = now_s

    def admitted(self) -> None:
        """Its turn has come: so long it waited in the queue, which is no part of the decision."""
        before_s = self._since_s
        self.resume()
        self.waited_s += self._since_s - before_s

    def resume(self) -> None:
        """Go on, after a wait."""
        self._since_s = self._clock()

    @property
    def total_s(self) -> float:
        """From its beginning to the end of the last stage, waits included."""
        return self._since_s - self.begun_s


class TracedStages(Stages):
    """Remembers each stage by itself: which, and from when to when."""

    __slots__ = ("intervals",)

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.intervals: list[tuple[int, float, float]] = []

    def end(self, stage: int) -> None:
        """See `Stages`."""
        begun_s = self._since_s
        super().end(stage)
        self.intervals.append((stage, begun_s, self._since_s))
