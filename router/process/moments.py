"""What a process does again and again, it does at the same moments.

Each at its own they wake the loop four times in a tenth of a second, and hold up four requests;
together they hold up one.
"""

import asyncio

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
