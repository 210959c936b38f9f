"""The order of one rank's events where the engine is asked for them: whose life are they?

TensorRT-LLM numbers events from 0 in every life and tells each of them once, to whoever asks first.
So nothing can be asked for again: a gap is a loss, whatever it hides, and nothing held before it
counts any more; numbers that go back begin a new life.
"""

from router.publisher.engine_steps import ApplyDecoded, Lost, NewLife, Step
from router.publisher.trtllm_events import TrtllmBatch

_TOLD = "returned before we asked, or to another client, or in an answer that did not arrive"


class PullLog:
    """Order of one rank's pulled events. `cursor`: the next event."""

    __slots__ = ("cursor",)

    def __init__(self, cursor: int = 0) -> None:
        self.cursor = cursor

    def take(self, batch: TrtllmBatch) -> list[Step]:
        """The steps that a batch asks for."""
        first, cursor = batch.first_event_id, self.cursor
        steps: list[Step] = []
        if first < cursor:
            steps.append(NewLife(f"event {first} comes where {cursor} was the next"))
            cursor = 0
        if first > cursor:
            steps.append(Lost(cursor, first - 1, _TOLD))
        steps.append(ApplyDecoded(first, batch))
        self.cursor = batch.last_event_id + 1
        return steps
