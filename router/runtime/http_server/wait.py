"""A future for one task, which resumes it without another iteration of the event loop."""

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any


class Wait:
    """A minimal future for a single task, which resumes inside `go_on`.

    A `Future` would resume it in the next iteration of the event loop, which costs as much as
    reading a response.

    So `go_on` may be called only by callbacks of the loop, as their last step: it returns after the
    task has run up to its next wait.
    """

    __slots__ = ("_asyncio_future_blocking", "_context", "_error", "_is_over", "_loop", "_resume")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._error: BaseException | None = None
        self._is_over = False

    def __await__(self) -> Generator["Wait", None, None]:
        self._asyncio_future_blocking = True
        yield self

    def go_on(self, error: BaseException | None = None) -> None:
        """Resume the task, or make it fail with `error`. A cancelled task ignores this."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._context.run(self._resume, self)

    # ── Called by asyncio.Task ───────────────────────────────────────────────────────────────────

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the waiting task."""
        return self._loop

    def add_done_callback(self, resume: Callable[["Wait"], Any], *, context: Context) -> None:
        """Register the waiting task; called once."""
        self._resume, self._context = resume, context

    def result(self) -> None:
        """Raise the error of the wait, if any."""
        if self._error is not None:
            raise self._error

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002 - as futures have it
        """Cancel the wait. Returns False if the task already resumes."""
        if self._is_over:
            return False
        self._is_over = True
        self._error = asyncio.CancelledError()
        self._loop.call_soon(self._resume, self, context=self._context)
        return True
