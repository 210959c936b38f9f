"""Threads for calls that may block for long or forever, each with a deadline."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from worker_agent.storage.errors import StorageError

T = TypeVar("T")


class IoThreads:
    """Threads that run calls in order of arrival, as many at once as there are threads.

    A call that has not returned in time is *late*: it may still write into the memory it was given.
    While a call is late no other one begins, and callers get StorageError at once. The threads are
    daemons: a disk that never responds does not keep the process alive.
    """

    __slots__ = ("_calls", "_late", "_name", "_threads", "_timeout_s")

    def __init__(self, name: str, timeout_s: float, count: int = 1) -> None:
        """Start the threads.

        `name`: name of the storage in errors. `timeout_s`: longest wait for a call. `count`: number
        of threads.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._late: list[Future[Any]] = []
        self._threads = [
            threading.Thread(target=self._run, name=f"io-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """Number of threads, and so of calls that run at once."""
        return len(self._threads)

    @property
    def is_late(self) -> bool:
        """True if a call that was given up has not returned."""
        return not all(late.done() for late in self._late)

    def check(self) -> None:
        """Raise StorageError while a call is late."""
        if self.is_late:
            raise StorageError(self._name, "an earlier call has not returned", "one that responds")

    def begin(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call behind earlier ones. Raises StorageError while a call is late."""
        self.check()
        self._late.clear()
        begun: Future[T] = Future()
        self._calls.put((begun, call))
        return begun

    def wait(self, begun: "Future[T]") -> T:
        """Return a call's result. Raises the call's own error, and StorageError if it is late."""
        try:
            return begun.result(self._timeout_s)
        except TimeoutError as error:
            if begun.done():
                raise
            self._late.append(begun)
            reason = f"no result within {self._timeout_s:g} s"
            raise StorageError(self._name, reason, "one that responds") from error

    def close(self) -> None:
        """Accept no more calls, and wait for those begun until the deadline."""
        for _ in self._threads:
            self._calls.put(None)
        until_s = time.monotonic() + self._timeout_s
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def _run(self) -> None:
        while (each := self._calls.get()) is not None:
            begun, call = each
            if not begun.set_running_or_notify_cancel():
                continue
            try:
                begun.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised again by `wait`
                begun.set_exception(error)
