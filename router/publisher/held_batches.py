"""Live batches that cannot be applied yet: in order of arrival, bounded in count and bytes."""

from msgspec import Struct

from router.publisher.engine_steps import Batch


class HeldBatch(Struct, frozen=True, gc=False):
    """A batch, and how many replays had been asked for when it arrived."""

    batch: Batch
    replays_asked: int


class HeldBatches:
    """A queue that refuses what it has no room for, and remembers that it did."""

    __slots__ = ("_batches", "_bytes", "_max_batches", "_max_bytes", "overflowed")

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: list[HeldBatch] = []
        self._bytes = 0
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, held: HeldBatch) -> bool:
        """Hold a batch; False if it had to be dropped."""
        size_bytes = self._bytes + len(held.batch.payload)
        if len(self._batches) >= self._max_batches or size_bytes > self._max_bytes:
            self.overflowed = True
            return False
        self._batches.append(held)
        self._bytes = size_bytes
        return True

    def by_sequence(self) -> dict[int, Batch]:
        """The last to arrive of each sequence."""
        return {held.batch.sequence: held.batch for held in self._batches}

    def take(self) -> list[HeldBatch]:
        """All of them, in order of arrival; the queue is empty and has room again."""
        batches, self._batches = self._batches, []
        self._bytes = 0
        self.overflowed = False
        return batches
