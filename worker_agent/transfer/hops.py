"""Two hops where there is no direct way, overlapped: near memory ─ staging ─ far.

    outward   near 0 │ near 1 │ near 2 │               near: gather, checksum  (the caller's thread)
                     │ far  0 │ far  1 │ far 2         far:  write, put        (the I/O threads)
    inward    far  0 │ far  1 │ far  2 │
                     │ near 0 │ near 1 │ near 2        far: read, get    near: checksum, scatter

The next batch waits for the far hop before it is free, so that it is never idle. No more than one
batch waits while the others are on it, one a thread; so one staging buffer more than threads is
enough, and batch i uses buffer i % that many.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, Self, TypeVar

from router.block_errors import StorageError
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.outcome import Outcome

T = TypeVar("T")


def outward(
    io: IoThreads | None,
    batches: Sequence[range],
    near: Callable[[range, int], None],
    far: Callable[[range, int], list[Outcome]],
) -> list[Outcome]:
    """Both hops for each batch. Where the far hop raises StorageError this and all later failed."""
    outcomes: list[Outcome] = []
    try:
        with Flight[list[Outcome]](io) as flight:
            for number, batch in enumerate(batches):
                near(batch, number % flight.buffers)
                flight.begin(far, batch, number % flight.buffers)
                outcomes += flight.land() if flight.is_full else []
            while flight.is_begun:
                outcomes += flight.land()
    except StorageError:
        return _failed(outcomes, batches)
    return outcomes


def inward(
    io: IoThreads | None,
    batches: Sequence[range],
    far: Callable[[range, int], T],
    near: Callable[[range, int, T], list[Outcome]],
) -> list[Outcome]:
    """Both hops for each batch. Where the far hop raises StorageError this and all later failed."""
    outcomes: list[Outcome] = []
    try:
        with Flight[T](io) as flight:
            ahead = flight.buffers
            for number, batch in enumerate(batches[:ahead]):
                flight.begin(far, batch, number)
            for number, batch in enumerate(batches):
                outcomes += near(batch, number % ahead, flight.land())
                if number + ahead < len(batches):
                    flight.begin(far, batches[number + ahead], number % ahead)
    except StorageError:
        return _failed(outcomes, batches)
    return outcomes


class Flight(Generic[T]):
    """Batches on their far hop, in order; without a thread each is back at once.

    Left only when nothing is on its way any more, or is given up as late.
    """

    __slots__ = ("_begun", "_io", "buffers")

    def __init__(self, io: IoThreads | None) -> None:
        self._io = io
        self.buffers = 1 + (1 if io is None else io.count)
        self._begun: deque[Future[T]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for waiting in self._begun:
            waiting.cancel()  # not one that is on its way
        for begun in self._begun:
            if not begun.cancelled():
                self._landed(begun)

    def begin(self, far: Callable[[range, int], T], batch: range, turn: int) -> None:
        """Send a batch. Raises StorageError while an earlier one is late."""
        if self._io is not None:
            self._begun.append(self._io.begin(lambda: far(batch, turn)))
            return
        begun = Future[T]()
        self._begun.append(begun)
        try:
            begun.set_result(far(batch, turn))
        except BaseException as error:  # noqa: BLE001 - raised where the batch lands
            begun.set_exception(error)

    @property
    def is_begun(self) -> bool:
        """Whether there is anything to land."""
        return bool(self._begun)

    @property
    def is_full(self) -> bool:
        """Whether one has to land before the next is sent; without a thread nothing is gained by
        waiting, and what failed is known at once.
        """
        return len(self._begun) == (1 if self._io is None else self.buffers)

    def land(self) -> T:
        """What came of the first. Raises StorageError, and what the far hop raised."""
        return self._landed(self._begun.popleft())

    def _landed(self, begun: "Future[T]") -> T:
        return begun.result() if self._io is None else self._io.wait(begun)


def batches_of(count: int, batch: int) -> list[range]:
    """`count` places in batches."""
    return [range(start, min(start + batch, count)) for start in range(0, count, batch)]


def _failed(outcomes: Sequence[Outcome], batches: Sequence[range]) -> list[Outcome]:
    return [*outcomes, *[Outcome.FAILED] * (sum(map(len, batches)) - len(outcomes))]
