"""What one task waits for, and goes on with at once."""

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any


class Wait:
    """A future as far as `asyncio.Task` needs one, for a single task, which goes on inside
    `go_on`: a `Future` has it wait for the event loop's next turn, which costs as much as reading
    an answer.

    So `go_on` is for callbacks of the loop alone, and the last thing that they do: whatever the
    task does next has happened when it returns.
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
        """Let the task go on, or fail; one that was cancelled hears of that instead."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._context.run(self._resume, self)

    # ── What tasks call ──────────────────────────────────────────────────────────────────────────

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Whose tasks may wait."""
        return self._loop

    def add_done_callback(self, resume: Callable[["Wait"], Any], *, context: Context) -> None:
        """A task waits; called once."""
        self._resume, self._context = resume, context

    def result(self) -> None:
        """Raises what the task is to fail with."""
        if self._error is not None:
            raise self._error

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002 - as futures have it
        """The task is cancelled; False: it goes on already."""
        if self._is_over:
            return False
        self._is_over = True
        self._error = asyncio.CancelledError()
        self._loop.call_soon(self._resume, self, context=self._context)
        return True
