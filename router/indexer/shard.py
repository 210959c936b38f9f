"""An index, and the thread that applies the changes posted to its queue."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

from router.indexer.base import DONE, Indexer
from router.protocol.events import EventBatch
from router.protocol.values import Rank

BATCH_CHANGES = 64
"""Limit of changes taken from the queue at once; they are applied before a waiter is notified."""

_Change: TypeAlias = tuple[Callable[..., object], Rank, tuple[object, ...]]
_NOBODY_WAITS = -1


class Shard:
    """An index with one caller, which reads it directly while no changes are pending.

    Ranks that were refused room or differ are appended to `differing`, and a change's exception to
    `failures`; all further changes are then ignored, so that no caller waits in vain.
    `workers`, and `staged`, the ranks with blocks staged here, are maintained by the caller.
    `_awaited`: the number of pending changes at which to wake the caller.
    """

    __slots__ = (
        "_awaited",
        "_differing",
        "_done",
        "_failures",
        "_is_over",
        "_posted",
        "_queue",
        "_reached",
        "_thread",
        "index",
        "staged",
        "workers",
    )

    def __init__(
        self, index: Indexer, differing: deque[Rank], failures: list[BaseException]
    ) -> None:
        self.index = index
        self.workers = 0
        self.staged: set[Rank] = set()
        self._differing = differing
        self._failures = failures
        self._is_over = False
        self._posted = self._done = 0
        self._awaited = _NOBODY_WAITS
        self._queue: SimpleQueue[_Change | None] = SimpleQueue()
        self._reached: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="index-shard", daemon=True)
        self._thread.start()

    def pending(self) -> int:
        """Return the number of posted changes that are not known to be applied."""
        return self._posted - self._done

    def post(
        self, method: Callable[..., object], rank: Rank, arguments: tuple[object, ...]
    ) -> None:
        """Queue a call of a method of the index; a result of False is a refusal."""
        self._posted += 1
        self._queue.put((method, rank, arguments))

    def wait(self, pending: int) -> None:
        """Block until at most `pending` changes are pending."""
        while self.pending() > pending:
            self._awaited = pending
            if self.pending() > pending:  # the thread updates the count before it reads `_awaited`
                self._reached.get()

    def stop(self) -> None:
        """Make the thread end after its present change; the rest is dropped."""
        self._is_over = True
        self._queue.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        while (changes := self._apply_batch()) is not None:
            self._done += changes
            if self.pending() <= self._awaited:
                self._awaited = _NOBODY_WAITS
                self._reached.put(None)

    def _apply_batch(self) -> int | None:
        """Wait for changes and apply them. Returns their number; None if the thread must end."""
        queue = self._queue
        batch = [queue.get()]
        batch += [queue.get() for _ in range(min(queue.qsize(), BATCH_CHANGES - 1))]
        try:
            self._apply(batch)
        except BaseException as failure:  # noqa: BLE001 - the caller must learn of any failure
            self._is_over = True
            self._failures.append(failure)
        return len(batch) if batch[-1] is not None else None

    def _apply(self, batch: Sequence[_Change | None]) -> None:
        for change in batch:
            if self._is_over or change is None:
                return
            method, rank, arguments = change
            if method(rank, *arguments) is False:
                self._differing.append(rank)
        self._differing.extend(self.index.take_differing())


def apply_all(rank: Rank, index: Indexer, batch: EventBatch) -> bool:
    """Apply a whole batch. Returns False if a block found no room, or the rank's sums differ."""
    progress = 0
    while progress >= 0:
        progress = index.apply(rank, batch, progress, len(batch.packed))
    return progress == DONE
