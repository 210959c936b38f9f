"""Calls that may take long or never come back, on threads of their own, each with a deadline."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from router.block_errors import StorageError

T = TypeVar("T")


class IoThreads:
    """Begins one call after the other, and has as many under way as there are threads.

    A call that is not back in time is *late*: it may still write into the memory it was given.
    While one is late nothing else is begun, and whoever asks is refused at once. The threads end
    with the process: a disk that never answers does not keep it.
    """

    __slots__ = ("_calls", "_late", "_name", "_threads", "_timeout_s")

    def __init__(self, name: str, timeout_s: float, count: int = 1) -> None:
        """`name` is what errors call it; `timeout_s`: how long a call is waited for; `count`: of
        threads.
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
        """As many calls are under way at once."""
        return len(self._threads)

    @property
    def is_late(self) -> bool:
        """Whether a call is still out that was given up."""
        return not all(late.done() for late in self._late)

    def check(self) -> None:
        """Raises StorageError while a call is late."""
        if self.is_late:
            raise StorageError(self._name, "an earlier call never came back", "one that answers")

    def begin(self, call: Callable[[], T]) -> "Future[T]":
        """Make a call, behind those begun before. Raises StorageError while one is late."""
        self.check()
        self._late.clear()
        begun: Future[T] = Future()
        self._calls.put((begun, call))
        return begun

    def wait(self, begun: "Future[T]") -> T:
        """What a call came to. Raises what it raised, and StorageError when it is late."""
        try:
            return begun.result(self._timeout_s)
        except TimeoutError as error:
            if begun.done():
                raise
            self._late.append(begun)
            reason = f"no answer within {self._timeout_s:g} s"
            raise StorageError(self._name, reason, "one that answers") from error

    def close(self) -> None:
        """Make no more calls; those begun are waited for until the deadline."""
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
            except BaseException as error:  # noqa: BLE001 - told to whoever waits for it
                begun.set_exception(error)
