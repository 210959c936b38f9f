"""A scheduler of sliced work on one event loop: jobs run in order, with pauses for other tasks."""

import asyncio
import time
from collections.abc import Callable, Iterable

TURN_S = 0.0003
"""The duration of a turn; its last slice may exceed it. Then all other ready tasks run."""


class SliceScheduler:
    """A scheduler of sliced work on one loop: one job after the other, in turns with pauses.

    Jobs share turns: many small jobs delay other tasks no longer than one large job.
    """

    __slots__ = ("_clock", "_mine", "_used_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mine = asyncio.Lock()
        self._used_s = 0.0

    async def carry_out(self, slices: Iterable[object]) -> None:
        """Exhaust an iterator of slices, in as many turns as needed; jobs run in order of arrival.

        If it is cancelled, the remaining slices are not run.
        """
        async with self._mine:
            since_s = self._clock() - self._used_s
            for _ in slices:
                if self._clock() >= since_s + TURN_S:
                    await asyncio.sleep(0)
                    since_s = self._clock()
            self._used_s = self._clock() - since_s
