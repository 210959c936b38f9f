"""An event loop in virtual time: nothing is waited for, and the same seed gives the same run.

It has no sockets, no threads and no clock. When nothing is ready to run, time jumps to the next
timer. What asyncio code does on it is decided by its own order and the caller's random numbers.
"""

import asyncio
from asyncio import base_events

_RESOLUTION_S = 1e-9


class Deadlock(AssertionError):
    """Nothing is ready and nothing is due: time would stand still for ever."""


class VirtualLoop(base_events.BaseEventLoop):
    """asyncio without the world. `time` starts at 0 and is exact to the timers that are set."""

    def __init__(self):
        super().__init__()
        self._now_s = 0.0
        self._clock_resolution = _RESOLUTION_S
        self._selector = self
        self.steps = 0

    def time(self):
        return self._now_s

    def select(self, timeout_s):
        """What a selector would do: nothing but to let the time pass."""
        self.steps += 1
        if timeout_s is None:
            raise Deadlock("nothing will ever happen again")
        if timeout_s > 0:
            self._now_s += timeout_s
        return ()

    def _process_events(self, event_list):
        """There are none."""

    def _write_to_self(self):
        """Do nothing: no other thread wakes this loop."""


def run(coroutine_of):
    """Run `coroutine_of(loop)` to its end in virtual time; what it returns."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine_of(loop))
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop):
    """In the order of their names, which count up, since sets have none."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: int(task.get_name().split("-")[-1]))
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
