"""Answers that one turn of the loop brought about, written together at its end.

    read, answer, read, answer, … ─▶ write, write, …

A write takes as long in the kernel as to find an answer, and wakes its reader: between one request
and the next it would cost them both what they have in the caches.
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable


class Turn:
    """What is to be written when this turn of the loop ends."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def flush_later(self, flush: Callable[[], None], loop: AbstractEventLoop) -> None:
        """Have a connection write at the end of this turn."""
        if not self._waiting:
            loop.call_soon(self._end)
        self._waiting.append(flush)

    def _end(self) -> None:
        waiting, self._waiting = self._waiting, []
        for flush in waiting:
            flush()
