"""Periodic work of a process, aligned to common times.

Unaligned timers wake the loop four times in a tenth of a second and delay four requests; aligned
timers delay one.
"""

import asyncio

LATE_S = 1.0
"""Delay of a periodic check after which the process is considered paused: stopped or starved."""

EARLY_S = 0.002
"""Margin for uvloop's timers, in seconds: they may end this much too early.

They count milliseconds from a loop time that may be as old as the current iteration.
"""


async def next_tick(interval_s: float) -> None:
    """Sleep until the next multiple of an interval on the loop's clock, or slightly longer.

    Tasks that sleep by the same interval, or a multiple, wake in the same iteration of the loop.
    """
    now_s = asyncio.get_running_loop().time()
    due_s = (now_s // interval_s + 1.0) * interval_s
    await asyncio.sleep(due_s - now_s + EARLY_S)


class PauseDetector:
    """A detector of process pauses, which invalidate timeouts of other processes.

    During a pause no message was received, and the pending ones are still unread: for `grace_s`
    after it, the silence of another process proves nothing.
    """

    __slots__ = ("_grace_s", "_last_s", "_until_s")

    def __init__(self, grace_s: float, now_s: float) -> None:
        self._grace_s = grace_s
        self._last_s = now_s
        self._until_s: float | None = None

    def is_over(self, now_s: float) -> bool:
        """Return whether timeouts are valid; called at every check.

        A pause is followed by one grace period only, so the result becomes True even if all checks
        are late.
        """
        is_late, self._last_s = now_s - self._last_s > LATE_S, now_s
        if self._until_s is not None:
            if now_s < self._until_s:
                return False
            self._until_s = None
        elif is_late:
            self._until_s = now_s + self._grace_s
        return self._until_s is None
