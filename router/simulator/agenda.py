"""The event queue of a simulation in virtual time."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class EventQueue:
    """Scheduled calls by time; calls at the same time run in the order in which they were added."""

    __slots__ = ("_calls", "_order", "now_s")

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.now_s = 0.0

    def at(self, at_s: float, act: Callable[..., None], *arguments: object) -> None:
        """Schedule a call at a time that is not in the past. O(log calls)."""
        self._order += 1
        heappush(self._calls, (at_s, self._order, act, arguments))

    def after(self, delay_s: float, act: Callable[..., None], *arguments: object) -> None:
        """Schedule a call after a delay."""
        self.at(self.now_s + delay_s, act, *arguments)

    def step(self) -> None:
        """Advance the time to the next call and run it. There must be one."""
        self.now_s, _, act, arguments = heappop(self._calls)
        act(*arguments)
