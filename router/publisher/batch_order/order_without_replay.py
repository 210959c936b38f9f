"""The order of an engine's batches where the engine has no replay.

Nothing can be verified or fetched again, so every unclear case is read the safe way: a gap is a
loss, and numbers that go back start a new life. A life is complete only if its batch 0 was seen. A
late batch may still arrive: for a short time, a gap waits for it.
"""

from router.publisher.batch_order.position import Cursor
from router.publisher.batch_order.steps import Batch, BatchOrderCounters


class UnreplayedOrder:
    """The order of one connection's batches."""

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
        position: Cursor,
        counters: BatchOrderCounters,
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
        """Continue at the number of the next batch, whatever it is."""
        self._is_open = True
        self._forget_early()

    def live(self, batch: Batch, now_s: float) -> None:
        """Process the next batch received."""
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
        """The time at which the wait for late batches ends; infinite without a gap."""
        return float("inf") if self.early_since_s is None else self.early_since_s + self._patience_s

    def tick(self, now_s: float) -> None:
        """Skip the gap if the wait for late batches is over."""
        if now_s >= self.due_s:
            self._skip_gap()

    def flush(self) -> None:
        """Skip all gaps at once, because the connection delivers no more batches."""
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
