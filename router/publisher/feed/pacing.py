"""Intervals of the work for followed engines: the more engines, the less often for each.

The work per second is bounded: at any number of engines there are at most about 1,250 probes, 2,000
ticks and 500 connection attempts a second, and a rank without a proof in time is `lagging`.

A few engines tick at the same time: one request is delayed by all of them now and then, instead of
one in fifty by a single one.
"""

from itertools import count
from math import ceil

_PROBE_S, _PROBE_S_PER_ENGINE = 0.4, 0.0008
_TICK_S, _TICK_S_PER_ENGINE = 0.4, 0.0005
_RETRY_S, _RETRY_S_PER_ENGINE = 1.0, 0.002
_PATIENCE_S, _PATIENCE_S_PER_ENGINE = 2.0, 0.005
_FIRST_RETRY_S = 0.1

_TOGETHER, _APART_S = 16, 0.005
"""The number of engines that tick at the same time, and the delay until the next ones tick."""


class Pacing:
    """The intervals of all followers of one process.

    Followers count themselves in and out (`engines`), so that the intervals of all of them adapt
    while they run. `numbers`: yields a number for each follower that ticks.
    """

    __slots__ = ("engines", "numbers")

    def __init__(self) -> None:
        self.engines = 0
        self.numbers = count()

    @property
    def probe_interval_s(self) -> float:
        """The time of silence after which an engine is probed.

        From 1,250 engines on it is more than a second, and idle ranks are `lagging` in between: no
        rank is `exact` with an older proof of it.
        """
        return max(_PROBE_S, self.engines * _PROBE_S_PER_ENGINE)

    @property
    def tick_s(self) -> float:
        """The longest time between two ticks."""
        return max(_TICK_S, self.engines * _TICK_S_PER_ENGINE)

    def next_tick_s(self, number: int, now_s: float) -> float:
        """Return the time of a number's next tick: within `tick_s`, together with a few others."""
        tick_s, moments = self.tick_s, max(ceil(self.engines / _TOGETHER), 1)
        phase_s = number % moments * _APART_S
        ticks = (now_s - phase_s) // tick_s
        due_s = (ticks + 1) * tick_s + phase_s
        return due_s if due_s > now_s else due_s + tick_s  # The quotient may be rounded down.

    @property
    def patience_s(self) -> float:
        """The timeout of a connection, and of each response of a replay."""
        return max(_PATIENCE_S, self.engines * _PATIENCE_S_PER_ENGINE)

    def retry_s(self, failures: int) -> float:
        """Return the delay of the next connection attempt after `failures` failures in a row."""
        most_s = max(_RETRY_S, self.engines * _RETRY_S_PER_ENGINE)
        return min(_FIRST_RETRY_S * 2.0 ** min(failures, 16), most_s)
