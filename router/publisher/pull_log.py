"""The order of one rank's events where the engine is asked for them: whose life are they?

TensorRT-LLM numbers events from 0 in every life and tells each of them once, to whoever asks first.
So nothing can be asked for again: a gap is a loss, and numbers that go back begin a new life.
"""

from router.publisher.engine_steps import ApplyDecoded, Lost, NewLife, Step
from router.publisher.trtllm_events import TrtllmBatch

_TOLD = "they were told before we asked, or to somebody else"


class PullLog:
    """Order of one rank's pulled events. `cursor`: the next event; None: nothing is known yet.

    `saved`: where a former process stopped. `was_away`: an answer may have been missed, so that a
    gap may hide a new life: it is taken for one.
    """

    __slots__ = ("_was_away", "cursor")

    def __init__(self, saved: int | None = None) -> None:
        self.cursor = saved
        self._was_away = saved is not None

    def away(self) -> None:
        """The engine did not answer, or what it answered could not be read."""
        self._was_away = True

    def take(self, batch: TrtllmBatch) -> list[Step]:
        """The steps that a batch asks for."""
        first, cursor = batch.first_event_id, self.cursor
        steps: list[Step] = []
        if cursor is not None and (first < cursor or (first > cursor and self._was_away)):
            steps.append(NewLife(f"event {first} comes where {cursor} was the next"))
            cursor = 0
        if first > (cursor or 0):
            steps.append(Lost(cursor or 0, first - 1, _TOLD))
        steps.append(ApplyDecoded(first, batch))
        self.cursor = batch.last_event_id + 1
        self._was_away = False
        return steps
