"""Copies in two overlapped hops if there is no direct way: near memory ─ staging ─ far storage.

    outward   near 0 │ near 1 │ near 2 │               near: gather, checksum  (the caller's thread)
                     │ far  0 │ far  1 │ far 2         far:  write, put        (the I/O threads)
    inward    far  0 │ far  1 │ far  2 │
                     │ near 0 │ near 1 │ near 2        far: read, get    near: checksum, scatter

The next batch is ready before an I/O thread is free, so that the far hop is never idle. At most one
batch waits while every thread works on one. Therefore one staging buffer more than threads is
enough: batch i uses buffer i modulo the number of buffers.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, Self, TypeVar

from worker_agent.storage.errors import StorageError
from worker_agent.transfer.io_threads import IoThreads
from worker_agent.transfer.plan import BlockResult

T = TypeVar("T")


def outward(
    io: IoThreads | None,
    batches: Sequence[range],
    near: Callable[[range, int], None],
    far: Callable[[range, int], list[BlockResult]],
) -> list[BlockResult]:
    """Run both hops of each batch, the near one first, and return the outcomes in order.

    If the far hop raises StorageError, this batch and all later ones have failed.
    """
    outcomes: list[BlockResult] = []
    try:
        with InFlightCopy[list[BlockResult]](io) as flight:
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
    near: Callable[[range, int, T], list[BlockResult]],
) -> list[BlockResult]:
    """Run both hops of each batch, the far one first, and return the outcomes in order.

    If the far hop raises StorageError, this batch and all later ones have failed.
    """
    outcomes: list[BlockResult] = []
    try:
        with InFlightCopy[T](io) as flight:
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


class InFlightCopy(Generic[T]):
    """Batches on their far hop, in order; without a thread each is complete at once.

    The context ends only when no batch is in flight, or the batch in flight is given up as late.
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
            waiting.cancel()  # A running call is not cancelled.
        for begun in self._begun:
            if not begun.cancelled():
                self._landed(begun)

    def begin(self, far: Callable[[range, int], T], batch: range, turn: int) -> None:
        """Begin the far hop of a batch. Raises StorageError while an earlier call is late."""
        if self._io is not None:
            self._begun.append(self._io.begin(lambda: far(batch, turn)))
            return
        begun = Future[T]()
        self._begun.append(begun)
        try:
            begun.set_result(far(batch, turn))
        except BaseException as error:  # noqa: BLE001 - raised by `land`
            begun.set_exception(error)

    @property
    def is_begun(self) -> bool:
        """True if a batch is in flight or complete and not taken."""
        return bool(self._begun)

    @property
    def is_full(self) -> bool:
        """True if a batch has to be taken before the next begins.

        Without a thread each batch is taken at once, because waiting gains nothing and errors show
        early.
        """
        return len(self._begun) == (1 if self._io is None else self.buffers)

    def land(self) -> T:
        """Return the result of the first batch. Raises StorageError, and the far hop's error."""
        return self._landed(self._begun.popleft())

    def _landed(self, begun: "Future[T]") -> T:
        return begun.result() if self._io is None else self._io.wait(begun)


def batches_of(count: int, batch: int) -> list[range]:
    """Return ranges of at most `batch` places that cover `count` places."""
    return [range(start, min(start + batch, count)) for start in range(0, count, batch)]


def _failed(outcomes: Sequence[BlockResult], batches: Sequence[range]) -> list[BlockResult]:
    return [*outcomes, *[BlockResult.FAILED] * (sum(map(len, batches)) - len(outcomes))]
