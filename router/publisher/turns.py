"""Work of one event loop in turns, so that nothing else waits for more than one of them."""

import asyncio
import time
from collections.abc import Callable, Iterable

TURN_S = 0.001
"""So long a turn takes, and as long as its last slice: everything else that is ready comes then."""


class Turns:
    """Whoever has much to do on a loop, one after the other, with pauses in between. Of one loop.

    Those who share it use up a turn together: many with little to do hold up nobody for longer than
    one with much.
    """

    __slots__ = ("_clock", "_mine", "_used_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mine = asyncio.Lock()
        self._used_s = 0.0

    async def carry_out(self, slices: Iterable[object]) -> None:
        """Go through slices of work to their end, however many turns that takes; who came first is
        first. Cancelled, it leaves the rest of them undone.
        """
        async with self._mine:
            since_s = self._clock() - self._used_s
            for _ in slices:
                if self._clock() >= since_s + TURN_S:
                    await asyncio.sleep(0)
                    since_s = self._clock()
            self._used_s = self._clock() - since_s
