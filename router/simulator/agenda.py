"""What happens when, in virtual time."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    """Calls to be made, by moment; those of one moment in the order in which they were put."""

    __slots__ = ("_calls", "_order", "now_s")

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.now_s = 0.0

    def at(self, at_s: float, act: Callable[..., None], *arguments: object) -> None:
        """Let something happen, not before now. O(log calls)."""
        self._order += 1
        heappush(self._calls, (at_s, self._order, act, arguments))

    def after(self, delay_s: float, act: Callable[..., None], *arguments: object) -> None:
        """The same, so long from now."""
        self.at(self.now_s + delay_s, act, *arguments)

    def step(self) -> None:
        """Let the next thing happen; there must be one."""
        self.now_s, _, act, arguments = heappop(self._calls)
        act(*arguments)
