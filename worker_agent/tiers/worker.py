"""The thread that calls of a tier, or of a peer, are made on: loads first, then the others in order
of arrival.

Nobody else touches the tier. What came of a call is told to whoever owns the stack, with what it
changed, and is worked out there: `tell` is called from this thread, and only hands over.
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

from router.block_errors import StorageError
from worker_agent.blocks.changes import CacheCleared, Change
from worker_agent.transfer.block_tier import BlockGiver

log = logging.getLogger(__name__)

T = TypeVar("T")


class Spent(Struct, frozen=True):
    """How long a call waited for its turn, and how long it took."""

    waited_s: float
    busy_s: float


class Call(Struct, Generic[T], frozen=True):
    """What to do with a tier, and what its owner does then; None: the tier is broken."""

    run: Callable[[], T]
    then: Callable[[T | None, Spent], None]


class Finished(Struct, frozen=True):
    """A call was made, and changed names; `finish` is the owner's part of it."""

    changes: list[Change]
    finish: Callable[[], None]


class TierWorker:
    """One tier's thread. A tier that raises is not asked again: it is as good as empty."""

    __slots__ = (
        "_calls",
        "_is_closing",
        "_loads",
        "_max_waiting",
        "_news",
        "_store",
        "_tell",
        "_thread",
        "is_broken",
        "name",
    )

    def __init__(
        self, name: str, store: BlockGiver, max_waiting: int, tell: Callable[[Finished], None]
    ) -> None:
        """`store`: what is touched on this thread alone. `max_waiting`: loads, and likewise other
        calls, beyond which `submit` refuses.
        """
        self.name = name
        self.is_broken = False
        self._store = store
        self._max_waiting = max_waiting
        self._tell = tell
        self._loads: deque[Callable[[], None]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._news = Condition()
        self._is_closing = False
        self._thread = Thread(target=self._run, name=f"tier-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Call[T], *, is_load: bool = False) -> bool:
        """Let a call wait for its turn; False if too many do, or the tier is closing."""
        due = partial(self._make, call, time.monotonic())
        return self._add(due, self._loads if is_load else self._calls)

    def ask(self, run: Callable[[], T]) -> "Future[T]":
        """The same for anybody, on any thread: the answer is the future's, once it was told."""
        future: Future[T] = Future()
        if not self._add(partial(self._make_asked, run, future), self._calls):
            future.set_exception(self._refusal())
        return future

    def close(self, deadline_s: float) -> bool:
        """Make the calls that wait, then close the tier; False where that is not done in time
        (monotonic), and goes on by itself.
        """
        with self._news:
            self._is_closing = True
            self._news.notify()
        self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def _add(self, due: Callable[[], None], waiting: deque[Callable[[], None]]) -> bool:
        with self._news:
            if self._is_closing or len(waiting) >= self._max_waiting:
                return False
            waiting.append(due)
            self._news.notify()
        return True

    def _run(self) -> None:
        while (due := self._next()) is not None:
            due()
        self._store.close()

    def _next(self) -> Callable[[], None] | None:
        with self._news:
            while not (self._loads or self._calls):
                if self._is_closing:
                    return None
                self._news.wait()
            return (self._loads or self._calls).popleft()

    def _make(self, call: Call[T], since_s: float) -> None:
        began_s = time.monotonic()
        answer, changes = self._answer(call.run)
        spent = Spent(began_s - since_s, time.monotonic() - began_s)
        self._tell(Finished(changes, partial(call.then, answer, spent)))

    def _make_asked(self, run: Callable[[], T], future: "Future[T]") -> None:
        if not future.set_running_or_notify_cancel():  # whoever asked waits no more
            return
        answers: list[T] = []
        _, changes = self._answer(lambda: answers.append(run()))
        self._tell(Finished(changes, _nothing))
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
            # Whatever it is, the engine goes on without this tier.
            log.exception("the %s tier is given up", self.name)
            self.is_broken = True
            return None, [CacheCleared()]

    def _refusal(self) -> StorageError:
        return StorageError(self.name, "closed, broken or too busy", "a tier that takes calls")


def _nothing() -> None:
    """Whoever asked has the answer."""
