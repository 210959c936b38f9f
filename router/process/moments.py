"""What a process does again and again, it does at the same moments.

Each at its own they wake the loop four times in a tenth of a second, and hold up four requests;
together they hold up one.
"""

import asyncio

LATE_S = 1.0
"""A process that did not come to a moment for so long stood still: stopped, or without a core."""

EARLY_S = 0.002
"""Timers of uvloop count in milliseconds, from a time that may be as old as the turn of the loop:
so much too early they end at most.
"""


async def next_moment(interval_s: float) -> None:
    """Sleep until the next multiple of an interval since the clock of all loops began, or a little
    longer: whoever sleeps by the same interval, or a multiple, wakes in the same turn.
    """
    now_s = asyncio.get_running_loop().time()
    due_s = (now_s // interval_s + 1.0) * interval_s
    await asyncio.sleep(due_s - now_s + EARLY_S)


class Standstill:
    """Whether time may be held against others. Who stood still heard nobody, and has yet to read
    what they said meanwhile: for `grace_s` after it their silence proves nothing.
    """

    __slots__ = ("_grace_s", "_last_s", "_until_s")

    def __init__(self, grace_s: float, now_s: float) -> None:
        self._grace_s = grace_s
        self._last_s = now_s
        self._until_s: float | None = None

    def is_over(self, now_s: float) -> bool:
        """Asked at every moment. However late all of them are, it is in the end."""
        is_late, self._last_s = now_s - self._last_s > LATE_S, now_s
        if self._until_s is not None:
            if now_s < self._until_s:
                return False
            self._until_s = None
        elif is_late:
            self._until_s = now_s + self._grace_s
        return self._until_s is None
