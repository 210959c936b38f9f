"""The order of an engine's batches where no replay can be had.

Nothing can be verified and nothing fetched again, so every doubt is read the safe way: a gap is
lost, and numbers that go back are a new life. Only a life that is seen to begin at 0 is whole. A
batch that is merely late may still arrive: for a moment, a gap waits for it.
"""

from router.publisher.engine_position import EnginePosition
from router.publisher.engine_steps import Batch, EngineLogCounters


class BlindOrder:
    """Order of one connection's batches."""

    __slots__ = (
        "_counters",
        "_is_open",
        "_max_early",
        "_patience_s",
        "_position",
        "early",
        "early_since_s",
    )

    def __init__(
        self,
        position: EnginePosition,
        counters: EngineLogCounters,
        max_early: int,
        patience_s: float,
    ) -> None:
        self._position = position
        self._counters = counters
        self._max_early = max_early
        self._patience_s = patience_s
        self._is_open = False
        self.early: dict[int, Batch] = {}
        self.early_since_s: float | None = None

    def reopen(self) -> None:
        """Whatever comes next is where it goes on."""
        self._is_open = True
        self._forget_early()

    def live(self, batch: Batch, now_s: float) -> None:
        """The next batch off the wire."""
        if self._is_open:
            self._open_at(batch.sequence)
        if batch.sequence > self._position.cursor:
            self._keep_early(batch, now_s)
        elif batch.sequence == self._position.cursor:
            self._position.apply(batch)
            self._apply_early()
        elif self._position.has(batch):
            self._counters.duplicates += 1
        else:
            self._begin_again(batch)

    @property
    def due_s(self) -> float:
        """When it is time to stop waiting for what is late."""
        return float("inf") if self.early_since_s is None else self.early_since_s + self._patience_s

    def tick(self, now_s: float) -> None:
        """Stop waiting for what is late."""
        if now_s >= self.due_s:
            self._skip_gap()

    def flush(self) -> None:
        """Nothing more will come on this connection: stop waiting at once."""
        while self.early:
            self._skip_gap()

    def _open_at(self, sequence: int) -> None:
        self._is_open = False
        if sequence == 0:
            self._position.new_life("seen from its first batch on")
        else:
            self._position.resume_at(sequence)

    def _begin_again(self, batch: Batch) -> None:
        self._forget_early()
        self._position.new_life(f"sequence numbers went back to {batch.sequence}")
        if batch.sequence:
            self._position.lose(batch.sequence - 1, "the life's beginning was not seen")
        self._position.apply(batch)

    def _keep_early(self, batch: Batch, now_s: float) -> None:
        self.early[batch.sequence] = batch
        if self.early_since_s is None:
            self.early_since_s = now_s
        if len(self.early) > self._max_early:
            self._skip_gap()

    def _apply_early(self) -> None:
        while (batch := self.early.pop(self._position.cursor, None)) is not None:
            self._position.apply(batch)
        if not self.early:
            self.early_since_s = None

    def _skip_gap(self) -> None:
        self._position.lose(min(self.early) - 1, "a gap, and no replay")
        self._apply_early()

    def _forget_early(self) -> None:
        self.early = {}
        self.early_since_s = None
