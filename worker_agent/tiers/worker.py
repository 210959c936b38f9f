"""The thread that calls a tier or a peer: loads first, then other calls in order of arrival.

No other thread uses the tier. Each call's result goes to the stack's owner together with the
changes it made, and is processed there: the callback runs on this thread, and only passes them on.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Condition, Thread
from typing import Generic, TypeVar

from msgspec import Struct

from worker_agent.blocks.changes import CacheCleared, Change
from worker_agent.storage.errors import StorageError
from worker_agent.transfer.block_tier import BlockGiver

log = logging.getLogger(__name__)

T = TypeVar("T")


class Spent(Struct, frozen=True):
    """Waiting time and running time of a call."""

    waited_s: float
    busy_s: float


class TierJob(Struct, Generic[T], frozen=True):
    """A call on a tier, and the continuation that its owner runs.

    `then` receives the result of `run`, or None if the tier is broken.
    """

    run: Callable[[], T]
    then: Callable[[T | None, Spent], None]


class Finished(Struct, frozen=True):
    """A finished call and the changes it made; the owner calls `finish`."""

    changes: list[Change]
    finish: Callable[[], None]


class TierWorker:
    """The thread of one tier. A tier that raises is not used again and counts as empty."""

    __slots__ = (
        "_calls",
        "_changed",
        "_is_closing",
        "_loads",
        "_max_waiting",
        "_on_finished",
        "_store",
        "_thread",
        "is_broken",
        "name",
    )

    def __init__(
        self,
        name: str,
        store: BlockGiver,
        max_waiting: int,
        on_finished: Callable[[Finished], None],
    ) -> None:
        """Start the thread.

        `store`: used on this thread alone. `max_waiting`: limit of waiting loads, and separately of
        other calls; beyond it, `submit` refuses them.
        """
        self.name = name
        self.is_broken = False
        self._store = store
        self._max_waiting = max_waiting
        self._on_finished = on_finished
        self._loads: deque[Callable[[], None]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = Condition()
        self._is_closing = False
        self._thread = Thread(target=self._run, name=f"tier-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: TierJob[T], *, is_load: bool = False) -> bool:
        """Queue a call. Returns False if too many calls wait, or the tier is closing."""
        due = partial(self._make, call, time.monotonic())
        return self._add(due, self._loads if is_load else self._calls)

    def call(self, run: Callable[[], T]) -> "Future[T]":
        """Queue a call from any thread; the future is set after its changes are passed on."""
        future: Future[T] = Future()
        if not self._add(partial(self._make_called, run, future), self._calls):
            future.set_exception(self._refusal())
        return future

    def close(self, deadline_s: float) -> bool:
        """Finish the waiting calls, then close the tier; return whether that ended in time.

        `deadline_s`: monotonic time. A thread that is late continues by itself.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def _add(self, due: Callable[[], None], waiting: deque[Callable[[], None]]) -> bool:
        with self._changed:
            if self._is_closing or len(waiting) >= self._max_waiting:
                return False
            waiting.append(due)
            self._changed.notify()
        return True

    def _run(self) -> None:
        while (due := self._next()) is not None:
            due()
        self._store.close()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not (self._loads or self._calls):
                if self._is_closing:
                    return None
                self._changed.wait()
            return (self._loads or self._calls).popleft()

    def _make(self, call: TierJob[T], since_s: float) -> None:
        began_s = time.monotonic()
        answer, changes = self._answer(call.run)
        spent = Spent(began_s - since_s, time.monotonic() - began_s)
        self._on_finished(Finished(changes, partial(call.then, answer, spent)))

    def _make_called(self, run: Callable[[], T], future: "Future[T]") -> None:
        if not future.set_running_or_notify_cancel():  # The caller no longer waits.
            return
        answers: list[T] = []
        _, changes = self._answer(lambda: answers.append(run()))
        self._on_finished(Finished(changes, _nothing))
        if answers:
            future.set_result(answers[0])
        else:
            future.set_exception(self._refusal())

    def _answer(self, run: Callable[[], T]) -> tuple[T | None, list[Change]]:
        if self.is_broken:
            return None, []
        try:
            return run(), self._store.take_changes()
        except Exception:
            # Any error disables this tier only; the engine continues without it.
            log.exception("%s tier disabled: a call failed", self.name)
            self.is_broken = True
            return None, [CacheCleared()]

    def _refusal(self) -> StorageError:
        return StorageError(self.name, "closed, broken or too busy", "a tier that takes calls")


def _nothing() -> None:
    """Do nothing: the future already has the result."""
